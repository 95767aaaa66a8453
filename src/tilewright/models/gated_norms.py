"""RMSNorm with a gate, of state-space models and linear attention, replaced by `ops.rms_norm_gated`.

Models differ in whether the gate comes before the norm or after it, in how many columns share one mean, and in where
they round; the gate may be left out, then the module's own forward runs.  As for `norms`, every form is compared with
the module in several pairs of weight and input dtypes, and the one that agrees in all of them is the formula.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.models.cpu_sizes import stays_with_torch
from tilewright.models.norms import DTYPES, probe_rows, takes_more
from tilewright.models.specialise import rename_argument
from tilewright.models.stand_in import (
    Match,
    NotReplaceable,
    Proposal,
    obstacle,
    probing,
    run_both,
    stand_in,
    weakest,
)


@dataclass(frozen=True)
class GatedRmsNormRecipe:
    """`ops.rms_norm_gated` with the module's own weight and eps, read at every call."""

    weight: str
    eps: str
    arguments: tuple[str, str]  # x and the gate
    norm_before_gate: bool
    group_size: int
    fp32_weight: bool
    activation: str
    squeezes: bool  # the module drops the dimension of a single token (Falcon-H1): such calls stay with it
    backend: str | None

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """forward(self, x, gate=None) -> y, the same shape."""
        weight, eps, squeezes, backend = self.weight, self.eps, self.squeezes, self.backend
        options: dict[str, Any] = {"norm_before_gate": self.norm_before_gate, "group_size": self.group_size}
        options |= {"fp32_weight": self.fp32_weight, "activation": self.activation}

        def forward(self: nn.Module, x: Tensor, gate: Tensor | None = None) -> Tensor:
            if gate is None or gate.shape != x.shape or gate.dtype != x.dtype or (squeezes and x.shape[1] == 1):
                return cls.forward(self, x, gate)
            if stays_with_torch("rms_norm_gated", x, backend):
                return cls.forward(self, x, gate)
            return ops.rms_norm_gated(
                x, gate, getattr(self, weight), eps=getattr(self, eps), **options, backend=backend
            )

        first, second = self.arguments
        return rename_argument(rename_argument(forward, "x", first), "gate", second)

    def __str__(self) -> str:
        order = "norm, then" if self.norm_before_gate else "norm of x times"
        rounding = ", weight in float32" if self.fp32_weight else ""
        return f"ops.rms_norm_gated, {order} {self.activation}(gate), means of {self.group_size}{rounding}"


def find(module: nn.Module, backend: str | None) -> Proposal | None:
    """Propose a norm that takes a gate; None if the module does not look like one.

    Raises NotReplaceable if it takes more than its input, and is not a norm with a gate.
    """
    if module._modules or "norm" not in type(module).__name__.lower() or not takes_more(module):
        return None
    _, *parameters = inspect.signature(type(module).forward).parameters
    weights = {name: p for name, p in module._parameters.items() if p is not None}
    eps = next((name for name, value in vars(module).items() if "eps" in name and isinstance(value, float)), None)
    if len(parameters) > 2 or len(weights) != 1 or eps is None:
        raise NotReplaceable("norm", "its forward takes more than one input, and is no RMSNorm with a gate")
    if reason := obstacle(module):
        raise NotReplaceable("norm", reason)
    ((weight, tensor),) = weights.items()
    if tensor.dim() != 1 or not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise NotReplaceable("norm", f"its weight is {tuple(tensor.shape)} {tensor.dtype}")
    best: tuple[GatedRmsNormRecipe, Match] | None = None
    for recipe in _candidates(module, weight, eps, (parameters[0], parameters[1])):
        verdict = _reproduces(module, recipe, tensor)
        if verdict and (best is None or verdict == "bitwise"):
            best = recipe, verdict
        if verdict == "bitwise":
            break
    if best is None:
        raise NotReplaceable("norm", "its forward takes more than one input, and is no known RMSNorm with a gate")
    recipe, verdict = best
    final = dataclasses.replace(recipe, backend=backend)
    return Proposal("norm", final, ("rms_norm_gated",), f"{final} ({verdict})")


def _candidates(module: nn.Module, weight: str, eps: str, arguments: tuple[str, str]) -> Iterator[GatedRmsNormRecipe]:
    """Every form.  A mean is that of all columns; or an integer of the module is their number, or that of groups."""
    tensor = module._parameters[weight]
    assert tensor is not None
    n = tensor.numel()
    numbers = [v for v in vars(module).values() if isinstance(v, int) and not isinstance(v, bool) and 0 < v < n]
    sizes = [n] + [size for v in numbers if n % v == 0 for size in (v, n // v)]
    forms = itertools.product(dict.fromkeys(sizes), (True, False), (False, True), ("silu", "sigmoid"), (False, True))
    for size, norm_before_gate, fp32_weight, activation, squeezes in forms:
        yield GatedRmsNormRecipe(
            weight, eps, arguments, norm_before_gate, size, fp32_weight, activation, squeezes, "torch"
        )


def _reproduces(module: nn.Module, recipe: GatedRmsNormRecipe, weight: Tensor) -> Match | None:
    """Compare on sequences, single tokens, rows and a call without the gate."""
    forward = recipe.build(type(module))
    verdicts: list[Match | None] = []
    for weight_dtype, x_dtype in dict.fromkeys(((weight.dtype, weight.dtype), *DTYPES)):
        with probing(weight.device):
            values = {recipe.weight: torch.randn(weight.shape, dtype=weight_dtype, device=weight.device)}
            clone = stand_in(module, parameters=values)
            x = probe_rows(weight.numel(), vars(module)[recipe.eps], weight.device).to(x_dtype)
            gate = torch.randn_like(x)
            for rows, training in ((slice(None), False), (slice(None), True), (slice(0, 1), False)):
                clone.training = training
                verdicts.append(run_both("norm", type(module).forward, forward, clone, x[:, rows], gate[:, rows]))
                if verdicts[-1] is None:
                    return None
            verdicts.append(run_both("norm", type(module).forward, forward, clone, x[:, 0], gate[:, 0]))
        if verdicts[-1] is None:
            return None
    return weakest(verdicts)
