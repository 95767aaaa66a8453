"""Mixture-of-experts weights: recognised and reported; not replaced in this version."""

from collections.abc import Callable

from torch import nn


def holds_experts(module: nn.Module) -> bool:
    """True for stacked expert weights (E, out, in), E >= 2, the form of transformers' experts interface.

    A class token and position embeddings, (1, S, H) each, do not count.
    """
    return sum(p is not None and p.dim() == 3 and p.shape[0] > 1 for p in module._parameters.values()) >= 2


def run_plainly(model: nn.Module) -> None:
    """Make a reference copy loop over its experts: the grouped kernels that transformers uses take no float64."""
    choose: Callable[[str], None] | None = getattr(model, "set_experts_implementation", None)
    if choose is not None and any(holds_experts(m) for m in model.modules()):
        choose("eager")
