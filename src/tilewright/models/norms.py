"""RMSNorm variants and LayerNorm: found by what they compute, replaced by `ops.rms_norm` or `ops.layer_norm`.

Model code spells RMSNorm in three ways that differ in where they round: normalise, cast, then multiply by the weight
(Llama, and T5 where weight and input have one dtype); multiply in float32, then cast (GPT-OSS, OLMo 2); the same with
1 + weight (Gemma). They agree in float32 and differ in bf16, so each candidate is compared with the module in several
pairs of weight and input dtypes; the one that agrees in all of them is the formula. Rows of very different magnitude
make a wrong or missing eps visible.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.models.cpu_sizes import stays_with_torch
from tilewright.models.specialise import rename_argument
from tilewright.models.stand_in import (
    Match,
    NotReplaceable,
    Proposal,
    obstacle,
    only_argument,
    probing,
    run_both,
    stand_in,
    weakest,
)

_WIDTH = 32  # of the rows that a norm without a weight is tried on
_WEIGHTS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# (weight, input): one dtype; and bf16 activations on float32 weights, as in mixed-precision training.
DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
)


@dataclass(frozen=True)
class RmsNormRecipe:
    """`ops.rms_norm` with the module's own weight and eps, read at every call."""

    weight: str | None  # None: it has none
    eps: str
    offset: float
    fp32_weight: bool
    argument: str
    backend: str | None
    one_dtype: bool = False  # T5: the module's forward keeps calls whose input and weight differ in dtype

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """forward(self, x) -> y, the same shape."""
        weight, eps, offset, fp32_weight, backend = self.weight, self.eps, self.offset, self.fp32_weight, self.backend
        one_dtype = self.one_dtype

        def forward(self: nn.Module, x: Tensor) -> Tensor:
            scale = None if weight is None else getattr(self, weight)
            keeps = torch.is_autocast_enabled(x.device.type) if scale is None else one_dtype and scale.dtype != x.dtype
            if keeps or stays_with_torch("rms_norm", x, backend):
                return cls.forward(self, x)
            return ops.rms_norm(
                x,
                scale,
                eps=getattr(self, eps),
                offset=offset,
                fp32_weight=fp32_weight,
                backend=backend,
            )

        return rename_argument(forward, "x", self.argument)

    def __str__(self) -> str:
        if self.weight is None:
            return "ops.rms_norm, without a weight"
        if self.offset:
            return f"ops.rms_norm, {self.offset:g} + weight"
        return f"ops.rms_norm, {'weight in float32' if self.fp32_weight else 'cast then weight'}"


@dataclass(frozen=True)
class LayerNormRecipe:
    """`ops.layer_norm` with the module's own weight, bias and eps.   offset: added to the weight (Nemotron).

    The op takes one dtype; a call that mixes two, or runs under autocast with an offset, stays with the module.
    """

    weight: str
    bias: str | None
    eps: str
    argument: str
    backend: str | None
    offset: float = 0.0

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """forward(self, x) -> y, the same shape."""
        weight, bias, eps, offset, backend = self.weight, self.bias, self.eps, self.offset, self.backend

        def forward(self: nn.Module, x: Tensor) -> Tensor:
            scale = getattr(self, weight)
            keeps = offset and torch.is_autocast_enabled(x.device.type)
            if keeps or scale.dtype != x.dtype or stays_with_torch("layer_norm", x, backend):
                return cls.forward(self, x)
            if offset:
                scale = scale + offset
            shift = None if bias is None else getattr(self, bias)
            return ops.layer_norm(x, scale, shift, eps=getattr(self, eps), backend=backend)

        return rename_argument(forward, "x", self.argument)

    def __str__(self) -> str:
        return f"ops.layer_norm, {self.offset:g} + weight" if self.offset else "ops.layer_norm"


def find(module: nn.Module, backend: str | None) -> Proposal | None:
    """Propose a norm; None if the module does not look like one.

    Raises NotReplaceable if it does and cannot be replaced.
    """
    named = "norm" in type(module).__name__.lower()
    eps_names = [name for name in vars(module) if "eps" in name]
    if module._modules or not (eps_names or named) or takes_more(module):
        return None
    try:
        return _find(module, eps_names, backend)
    except NotReplaceable:
        if named:
            raise
        return None  # an eps alone does not make it a norm


def takes_more(module: nn.Module) -> bool:
    """Does forward take more than its input?  Then `gated_norms` looks at it."""
    forward = inspect.getattr_static(type(module), "forward", None)
    return inspect.isfunction(forward) and len(inspect.signature(forward).parameters) > 2


def _find(module: nn.Module, eps_names: list[str], backend: str | None) -> Proposal:
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    if not parameters and "normalized_shape" in vars(module):
        raise NotReplaceable("norm", "has no weight")  # torch's, which autocast treats in its own way
    if odd := next((p.dtype for p in parameters.values() if p.dtype not in _WEIGHTS), None):
        raise NotReplaceable("norm", f"its weight is {odd}")
    if any(p.dim() != 1 for p in parameters.values()):
        raise NotReplaceable("norm", "its weight has more than one dimension")
    if (argument := only_argument(module)) is None:
        raise NotReplaceable("norm", "its forward has no argument that can be named")
    if reason := obstacle(module):
        raise NotReplaceable("norm", reason)
    eps = next((name for name in eps_names if isinstance(vars(module)[name], float)), None)
    if eps is None:
        raise NotReplaceable("norm", "has no eps that is a number")

    best: tuple[RmsNormRecipe | LayerNormRecipe, Match] | None = None
    for recipe in _candidates(parameters, eps, argument):
        verdict = _reproduces(module, recipe, vars(module)[eps])
        if verdict and (best is None or verdict == "bitwise"):
            best = recipe, verdict
        if verdict == "bitwise":
            break
    if best is None:
        raise NotReplaceable(
            "norm", "computes none of the known formulas (RMSNorm, LayerNorm, each also with 1 + weight)"
        )
    recipe, verdict = best
    op = "layer_norm" if isinstance(recipe, LayerNormRecipe) else "rms_norm"
    return Proposal("norm", dataclasses.replace(recipe, backend=backend), (op,), f"{recipe} ({verdict})")


def _candidates(
    parameters: dict[str, nn.Parameter], eps: str, argument: str
) -> Iterator[RmsNormRecipe | LayerNormRecipe]:
    bias = next((name for name in parameters if "bias" in name or "beta" in name), None)
    weight = next((name for name in parameters if name != bias), None)
    if not parameters:
        yield RmsNormRecipe(None, eps, 0.0, False, argument, "torch")
    if weight is None or len(parameters) > 2 or (len(parameters) == 2 and bias is None):
        return
    if bias is None:
        for offset, fp32_weight in ((0.0, False), (0.0, True), (1.0, True)):
            yield RmsNormRecipe(weight, eps, offset, fp32_weight, argument, "torch")
        yield RmsNormRecipe(weight, eps, 0.0, False, argument, "torch", one_dtype=True)
    for offset in (0.0, 1.0):
        yield LayerNormRecipe(weight, bias, eps, argument, "torch", offset)


def _reproduces(module: nn.Module, recipe: RmsNormRecipe | LayerNormRecipe, eps: float) -> Match | None:
    weight = torch.empty(_WIDTH) if recipe.weight is None else module._parameters[recipe.weight]
    assert weight is not None
    own_dtypes = (weight.dtype, weight.dtype)
    forward = recipe.build(type(module))
    verdicts: list[Match | None] = []
    for weight_dtype, x_dtype in dict.fromkeys((own_dtypes, *DTYPES)):
        with probing(weight.device):
            names = [name for name, p in module._parameters.items() if p is not None]
            values = {name: torch.randn(weight.shape, dtype=weight_dtype, device=weight.device) for name in names}
            x = probe_rows(weight.numel(), eps, weight.device).to(x_dtype)
            clone = stand_in(module, parameters=values)
            for training in (False, True):
                clone.training = training
                verdicts.append(run_both("norm", type(module).forward, forward, clone, x))
        if verdicts[-1] is None:
            return None
    return weakest(verdicts)


def probe_rows(n: int, eps: float, device: torch.device) -> Tensor:
    """(4, 2, n) float32 rows, off-centre, of rms about 0.3 sqrt(eps), sqrt(eps), 1 and 30: the first two show eps."""
    scale = torch.tensor([0.3 * eps**0.5, eps**0.5, 1.0, 30.0], device=device)
    return (torch.randn(4, 2, n, device=device) + 0.5) * scale[:, None, None]
