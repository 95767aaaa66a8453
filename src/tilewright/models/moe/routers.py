"""Routers of mixtures of experts: a linear layer, whose logits `ops.topk_softmax` or `ops.topk_sigmoid` turn into
experts and weights.

A router holds a weight (E, H), perhaps a bias of its logits and one of the choice, and returns logits, weights and ids
of the experts of each token.  How it chooses is not read from names: with the numbers that the module holds for groups
and scale, every form of the ops is tried on a stand-in until one chooses the same experts with the same weights.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright import ops
from tilewright.dispatch.preference import resolve
from tilewright.errors import TilewrightError
from tilewright.models.specialise import rename_argument
from tilewright.models.stand_in import (
    Match,
    NotReplaceable,
    Proposal,
    call,
    obstacle,
    only_argument,
    probing,
    stand_in,
    weakest,
)

_MOST_EXPERTS, _MOST_ELEMENTS, _TOKENS, _FEWEST = 4096, 1 << 25, 48, 8
_ROUNDINGS = 4  # of a weight, whose sums the ops make in another order


@dataclass(frozen=True)
class RouterRecipe:
    """Logits by F.linear as before, their choice by one op; on a CPU, unless a backend is named, all as before."""

    weight: str
    bias: str | None  # of the logits
    correction: str | None  # of the choice
    op: Literal["topk_softmax", "topk_sigmoid"]
    k: int
    renormalize: bool
    n_group: int
    topk_group: int
    scale: float
    upcast: bool  # logits in float32
    cast: bool  # weights in the dtype of the logits
    argument: str
    backend: str | None

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """forward(self, x) -> logits (T, E), weights (T, k), ids (T, k)."""
        names, upcast, cast, backend, choose = (
            (self.weight, self.bias),
            self.upcast,
            self.cast,
            self.backend,
            self.choose,
        )
        correction = self.correction

        def router(self: nn.Module, x: Tensor) -> Any:
            if x.device.type == "cpu" and resolve(backend)[0] == "auto":
                return cls.forward(self, x)
            weight, bias = getattr(self, names[0]), None if names[1] is None else getattr(self, names[1])
            x = x.reshape(-1, weight.shape[1])
            logits = F.linear(x.to(torch.float32), weight.to(torch.float32)) if upcast else F.linear(x, weight, bias)
            weights, ids = choose(logits, None if correction is None else getattr(self, correction), backend)
            return logits, weights.to(logits.dtype) if cast else weights, ids

        return rename_argument(router, "x", self.argument)

    def choose(self, logits: Tensor, correction: Tensor | None, backend: str | None) -> tuple[Tensor, Tensor]:
        """(weights in float32, ids), the largest first."""
        if self.op == "topk_sigmoid":
            return ops.topk_sigmoid(
                logits, self.k, bias=correction, n_group=self.n_group, topk_group=self.topk_group,
                renormalize=self.renormalize, scale=self.scale, backend=backend,
            )  # fmt: skip
        weights, ids = ops.topk_softmax(logits, self.k, renormalize=self.renormalize, bias=correction, backend=backend)
        return weights if self.scale == 1.0 else weights * self.scale, ids

    def __str__(self) -> str:
        groups = f", {self.topk_group} of {self.n_group} groups" if self.n_group > 1 else ""
        scale = f", times {self.scale:g}" if self.scale != 1.0 else ""
        return f"ops.{self.op}, {self.k} experts{groups}{', renormalized' * self.renormalize}{scale}"


def find(module: nn.Module, backend: str | None) -> Proposal | None:
    """Propose a router; None if the module is none.

    Raises NotReplaceable if it chooses in another way than our ops.
    """
    names = _names(module)
    argument = only_argument(module)
    if names is None or argument is None:
        return None
    samples = [_sample(module, *names, dtype) for dtype in (torch.float32, torch.bfloat16)]
    full, narrow = samples
    if full is None or narrow is None:
        return None
    if reason := obstacle(module):
        raise NotReplaceable("routers", reason)
    best: tuple[RouterRecipe, Match] | None = None
    for candidate in _candidates(module, *names, full, narrow, argument):
        verdict = weakest([_same(candidate, full), _same(candidate, narrow)])
        if verdict and (best is None or verdict == "bitwise"):
            best = candidate, verdict
        if verdict == "bitwise":
            break
    if best is None:
        raise NotReplaceable("routers", "chooses experts in another way than ops.topk_softmax and ops.topk_sigmoid")
    recipe, verdict = best
    return Proposal("routers", dataclasses.replace(recipe, backend=backend), (recipe.op,), f"{recipe} ({verdict})")


@dataclass(frozen=True)
class _Sample:
    """What a module made of random tokens, those left out whose choice is of equal scores."""

    logits: Tensor
    weights: Tensor
    ids: Tensor
    correction: Tensor | None
    dtype: torch.dtype


def _names(module: nn.Module) -> tuple[str, str | None, str | None] | None:
    """Names of the weight, of the bias of the logits and of that of the choice, of what may be a router."""
    if isinstance(module, (nn.Linear, nn.Embedding)) or any(m is not None for m in module._modules.values()):
        return None
    held = {name: p for name, p in module._parameters.items() if p is not None}
    weights = [name for name, p in held.items() if p.dim() == 2]
    if len(weights) != 1 or not held[weights[0]].is_floating_point():
        return None
    experts, width = held[weights[0]].shape
    if not 2 <= experts <= _MOST_EXPERTS or experts * width > _MOST_ELEMENTS:
        return None
    biases = [name for name, p in held.items() if tuple(p.shape) == (experts,)]
    corrections = [name for name, b in module._buffers.items() if b is not None and tuple(b.shape) == (experts,)]
    if len(biases) + 1 != len(held) or len(biases) > 1 or len(corrections) > 1:
        return None
    return weights[0], biases[0] if biases else None, corrections[0] if corrections else None


def _sample(
    module: nn.Module, weight: str, bias: str | None, correction: str | None, dtype: torch.dtype
) -> _Sample | None:
    """Run the module's own forward on a CPU; None where it returns something else than a router."""
    with probing(torch.device("cpu")):
        experts, width = module._parameters[weight].shape  # type: ignore[union-attr]
        parameters = {weight: (torch.randn(experts, width) * width**-0.5).to(dtype)}
        if bias is not None:
            parameters[bias] = torch.randn(experts).to(dtype)
        clone = stand_in(module, parameters=parameters)
        if correction is not None:
            clone._buffers[correction] = 0.2 * torch.randn(experts)
        x = (2 * torch.randn(_TOKENS, width)).to(dtype)
        try:
            result = call("routers", type(module).forward, clone, x)
        except NotReplaceable:  # whatever it is, it is no router
            return None
    if not (isinstance(result, tuple) and len(result) == 3 and all(isinstance(t, Tensor) for t in result)):
        return None
    logits, weights, ids = result
    if tuple(logits.shape) != (_TOKENS, experts) or weights.shape != ids.shape or ids.dim() != 2:
        return None
    if ids.dtype != torch.int64 or not torch.equal(logits, _logits(clone, weight, bias, x, logits.dtype)):
        return None
    ordered = logits.float().sort(-1, descending=True).values[:, : ids.shape[1] + 1]
    differ = (ordered[:, 1:] != ordered[:, :-1]).all(-1)
    if int(differ.sum()) < _FEWEST:
        return None
    return _Sample(logits[differ], weights[differ], ids[differ], clone._buffers.get(correction or ""), dtype)


def _logits(module: nn.Module, weight: str, bias: str | None, x: Tensor, dtype: torch.dtype) -> Tensor:
    w, b = getattr(module, weight), None if bias is None else getattr(module, bias)
    return F.linear(x, w, b) if dtype == x.dtype else F.linear(x.to(dtype), w.to(dtype))


def _candidates(
    module: nn.Module, weight: str, bias: str | None, correction: str | None, full: _Sample, narrow: _Sample,
    argument: str,
) -> Iterator[RouterRecipe]:  # fmt: skip
    """Every form of the ops with the numbers that the module holds."""
    numbers = [v for v in vars(module).values() if isinstance(v, (int, float)) and not isinstance(v, bool)]
    integers = dict.fromkeys(v for v in numbers if isinstance(v, int))
    experts, k = full.logits.shape[1], full.ids.shape[1]
    scales = dict.fromkeys((1.0, *(float(v) for v in numbers if v > 0)))
    groups = [(1, 1), *((g, t) for g, t in itertools.product(integers, integers) if _are_groups(experts, k, g, t))]
    is_wide = narrow.logits.dtype == torch.float32
    if is_wide and bias is not None:
        return
    cast = narrow.weights.dtype == narrow.logits.dtype and not is_wide
    for renormalize, scale in itertools.product((True, False), scales):
        rest = (scale, is_wide, cast, argument, "torch")
        yield RouterRecipe(weight, bias, correction, "topk_softmax", k, renormalize, 1, 1, *rest)
        for n_group, topk_group in groups:
            yield RouterRecipe(
                weight, bias, correction, "topk_sigmoid", k, renormalize, n_group, topk_group, *rest
            )  # fmt: skip


def _are_groups(experts: int, k: int, n_group: int, topk_group: int) -> bool:
    if n_group < 2 or not 1 <= topk_group <= n_group or experts % n_group:
        return False
    size = experts // n_group
    return size >= 2 and topk_group * size >= k


def _same(recipe: RouterRecipe, sample: _Sample) -> Match | None:
    """Whether the recipe chooses the sample's experts, in any order, with their weights."""
    try:
        with torch.no_grad():
            weights, ids = recipe.choose(sample.logits, sample.correction, "torch")
    except TilewrightError:
        return None
    ours, theirs = ids.sort(-1), sample.ids.sort(-1)
    if not torch.equal(ours.values, theirs.values):
        return None
    weights = weights.to(sample.logits.dtype) if recipe.cast else weights
    got, expected = weights.gather(1, ours.indices), sample.weights.gather(1, theirs.indices)
    if got.dtype != expected.dtype:
        return None
    if torch.equal(got, expected):
        return "bitwise"
    close = (got - expected).abs() <= _ROUNDINGS * torch.finfo(got.dtype).eps * expected.abs()
    return "to rounding" if bool(close.all()) else None
