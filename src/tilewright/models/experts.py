"""Mixture-of-experts weights in the form of transformers' experts interface, run by `ops.fused_moe`.

A module of experts holds w1 (E, 2 I, H) and w2 (E, H, I) and takes hidden states, the experts of each token and their
weights.  Which parameter is which follows from their shapes; which gate it is, and that the gates come first, is tried
on a stand-in with narrow experts, as many as the module has.  Routers stay as they are.
"""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.models.cpu_sizes import stays_with_torch
from tilewright.models.stand_in import (
    Match,
    NotReplaceable,
    Proposal,
    obstacle,
    placement,
    probing,
    run_both,
    stand_in,
    weakest,
)

Activation = Literal["silu", "gelu"]
_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
_WIDTH, _INNER, _TOKENS, _CHOSEN = 16, 24, 9, 2  # of the stand-in


@dataclass(frozen=True)
class ExpertsRecipe:
    """Every token's experts by one `ops.fused_moe`; other dtypes than the weights' run as before."""

    w1: str
    w2: str
    activation: Activation
    backend: str | None

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """forward(self, hidden_states, top_k_index, top_k_weights) -> (T, H)."""
        w1, w2, activation, backend = self.w1, self.w2, self.activation, self.backend

        def experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            first, second = getattr(self, w1), getattr(self, w2)
            if hidden_states.dtype != first.dtype or stays_with_torch("fused_moe", hidden_states, backend):
                result: Tensor = cls.forward(self, hidden_states, top_k_index, top_k_weights)
                return result
            return ops.fused_moe(
                hidden_states, first, second, top_k_weights, top_k_index, activation=activation, backend=backend
            )

        return experts

    def __str__(self) -> str:
        return f"ops.fused_moe, {self.activation} on the first half of {self.w1}"


def find(module: nn.Module, backend: str | None) -> Proposal | None:
    """Propose experts; None if the module holds none.

    Raises NotReplaceable if they are of another form.
    """
    if not holds_experts(module):
        return None
    names = _names(module)
    if names is None:
        raise NotReplaceable("experts", "are not gates and ups in (E, 2 I, H), then (E, H, I), without biases")
    if reason := obstacle(module):
        raise NotReplaceable("experts", reason)
    signature = inspect.signature(type(module).forward)
    if tuple(signature.parameters)[1:] != _ARGUMENTS:
        raise NotReplaceable("experts", f"its forward takes other arguments than {', '.join(_ARGUMENTS)}")
    best: tuple[ExpertsRecipe, Match] | None = None
    activations: tuple[Activation, ...] = ("silu", "gelu")
    for activation in activations:
        recipe = ExpertsRecipe(*names, activation, "torch")
        verdict = _reproduces(module, recipe)
        if verdict and (best is None or verdict == "bitwise"):
            best = recipe, verdict
    if best is None:
        raise NotReplaceable("experts", "are not (act(x G^T) * (x U^T)) D^T with SiLU or GELU, gates first")
    recipe, verdict = best
    return Proposal("experts", dataclasses.replace(recipe, backend=backend), ("fused_moe",), f"{recipe} ({verdict})")


def _names(module: nn.Module) -> tuple[str, str] | None:
    """Names of w1 (E, 2 I, H) and w2 (E, H, I), if the module has these alone."""
    held = [(name, p) for name, p in module._parameters.items() if p is not None]
    if len(held) != 2:
        return None
    for (first, a), (second, b) in (held, held[::-1]):
        if a.dim() == b.dim() == 3 and tuple(a.shape) == (b.shape[0], 2 * b.shape[2], b.shape[1]):
            return first, second
    return None


def _reproduces(module: nn.Module, recipe: ExpertsRecipe) -> Match | None:
    """Compare on a CPU, whose products take every dtype: what is probed is the form, not a kernel.

    Sums are exact in any order, as two functions may differ in theirs: eighths in the first product, two terms in the
    second.
    """
    forward, device = recipe.build(type(module)), torch.device("cpu")
    experts = getattr(module, recipe.w1).shape[0]
    verdicts: list[Match | None] = []
    for dtype in dict.fromkeys((placement(module)[1], torch.float32)):
        with probing(device):
            two = torch.rand(experts, _WIDTH, _INNER).argsort(-1) < 2
            weights = {
                recipe.w1: (torch.randint(-8, 9, (experts, 2 * _INNER, _WIDTH)) / 8).to(dtype),
                recipe.w2: torch.where(two, torch.randn(two.shape), 0).to(dtype),
            }
            clone = stand_in(module, parameters=weights)
            ids = torch.rand(_TOKENS, experts).argsort(1)[:, : min(_CHOSEN, experts)]
            x = (torch.randint(-8, 9, (_TOKENS, _WIDTH)) / 8).to(dtype)
            args = x, ids, torch.rand(ids.shape, dtype=dtype)
            verdicts.append(run_both("experts", type(module).forward, forward, clone, *args))
    return weakest(verdicts)


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
