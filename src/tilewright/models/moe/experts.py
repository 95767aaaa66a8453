"""Mixture-of-experts weights in the form of transformers' experts interface, run by `ops.fused_moe`.

A module of experts holds w1 (E, 2 I, H) and w2 (E, H, I), or both transposed, perhaps a bias of each, and takes hidden
states, the experts of each token and their weights.  Which parameter is which follows from their shapes; which gate it
is, and whether gates come first or beside their ups, is tried on a stand-in with narrow experts, as many as the module
has.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

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
    placement,
    probing,
    run_both,
    stand_in,
    weakest,
)

Activation = Literal["silu", "gelu", "swigluoai"]
_WIDTH, _INNER, _TOKENS, _CHOSEN = 16, 24, 9, 2  # of the stand-in
_GATES = ((1.702, 7.0),)  # alpha and limit of gpt-oss


@dataclass(frozen=True)
class ExpertsRecipe:
    """Every token's experts by one `ops.fused_moe`; other dtypes than the weights' run as before."""

    w1: str
    w2: str
    activation: Activation
    backend: str | None
    biases: tuple[str, str] | None = None
    transposed: bool = False
    interleaved: bool = False
    alpha: float = 0.0
    limit: float = 0.0
    arguments: tuple[str, str, str] = ("hidden_states", "top_k_index", "top_k_weights")

    @property
    def op(self) -> str:
        """Name of the op that has these experts' form."""
        plain = self.biases is None and not self.transposed and not self.interleaved and self.activation != "swigluoai"
        return "fused_moe" if plain else "fused_moe_bias"

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """forward(self, hidden_states, top_k_index, top_k_weights) -> (T, H)."""
        forward = self._plain(cls) if self.op == "fused_moe" else self._with_biases(cls)
        for ours, theirs in zip(type(self).arguments, self.arguments, strict=True):
            forward = rename_argument(forward, ours, theirs)
        return forward

    def _plain(self, cls: type[nn.Module]) -> Callable[..., Any]:
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

    def _with_biases(self, cls: type[nn.Module]) -> Callable[..., Any]:
        w1, w2, transposed, backend = self.w1, self.w2, self.transposed, self.backend
        b1, b2 = self.biases or (None, None)
        options: dict[str, Any] = {"activation": self.activation, "interleaved": self.interleaved}
        if self.activation == "swigluoai":
            options |= {"alpha": self.alpha, "limit": self.limit}

        def experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            first, second = getattr(self, w1), getattr(self, w2)
            if hidden_states.dtype != first.dtype or stays_with_torch("fused_moe", hidden_states, backend):
                result: Tensor = cls.forward(self, hidden_states, top_k_index, top_k_weights)
                return result
            if transposed:
                first, second = first.mT, second.mT
            biases = {} if b1 is None or b2 is None else {"w1_bias": getattr(self, b1), "w2_bias": getattr(self, b2)}
            return ops.fused_moe_bias(
                hidden_states, first, second, top_k_weights, top_k_index, **biases, **options, backend=backend
            )

        return experts

    def __str__(self) -> str:
        place = "every second column" if self.interleaved else "the first half"
        gate = f"{self.activation} on {place} of {self.w1}"
        extras = ", biases" * (self.biases is not None) + ", transposed weights" * self.transposed
        return f"ops.{self.op}, {gate}{extras}"


def find(module: nn.Module, backend: str | None) -> Proposal | None:
    """Propose experts; None if the module holds none.

    Raises NotReplaceable if they are of another form.
    """
    if reason := _packed(module):
        raise NotReplaceable("experts", reason)
    if not holds_experts(module):
        return None
    forms = list(_forms(module))
    if not forms:
        raise NotReplaceable("experts", "are not gates and ups (E, 2 I, H), then (E, H, I), both perhaps transposed")
    if reason := obstacle(module):
        raise NotReplaceable("experts", reason)
    names = tuple(inspect.signature(type(module).forward).parameters)[1:]
    if len(names) == 1:
        raise NotReplaceable("experts", "each take all tokens: what runs is decided by the block that holds them")
    if len(names) != 3:
        raise NotReplaceable(
            "experts", f"its forward takes {', '.join(names)}; needs tokens, their experts and weights"
        )
    best: tuple[ExpertsRecipe, Match] | None = None
    for form in forms:
        recipe = dataclasses.replace(form, arguments=names)
        verdict = _reproduces(module, recipe)
        if verdict and (best is None or verdict == "bitwise"):
            best = recipe, verdict
        if verdict == "bitwise":
            break
    if best is None:
        raise NotReplaceable("experts", "have another gate than SiLU, GELU in its tanh form, or that of gpt-oss")
    recipe, verdict = best
    return Proposal("experts", dataclasses.replace(recipe, backend=backend), (recipe.op,), f"{recipe} ({verdict})")


def _packed(module: nn.Module) -> str | None:
    """Why experts are left whose weights are kept in fewer bits; None for others."""
    packed = [n for n, p in module._parameters.items() if p is not None and p.dim() > 3 and p.dtype == torch.uint8]
    if packed or "gate_up_proj_precision_config" in vars(module):
        return (
            "are kept in mxfp4, which ops.fused_moe does not read; load them with "
            "quantization_config=Mxfp4Config(dequantize=True)"
        )
    return None


def _forms(module: nn.Module) -> Iterator[ExpertsRecipe]:
    """Every form that the shapes allow, the plain ones first."""
    held = {name: p for name, p in module._parameters.items() if p is not None}
    stacks = [(name, p) for name, p in held.items() if p.dim() == 3]
    flat = [(name, p) for name, p in held.items() if p.dim() == 2]
    if len(stacks) != 2 or len(flat) not in (0, 2) or len(held) != 2 + len(flat):
        return
    for ((w1, a), (w2, b)), transposed in itertools.product((stacks, stacks[::-1]), (False, True)):
        first, second = (a.mT, b.mT) if transposed else (a, b)
        experts, width, inner = second.shape
        if tuple(first.shape) != (experts, 2 * inner, width):
            continue
        orders = [(x[0], y[0]) for x, y in (flat, flat[::-1]) if _are_biases(x[1], y[1], first)] if flat else [None]
        for biases, interleaved in itertools.product(orders, (False, True)):
            for activation, alpha, limit in _gates(module):
                yield ExpertsRecipe(w1, w2, activation, "torch", biases, transposed, interleaved, alpha, limit)


def _are_biases(first: Tensor, second: Tensor, w1: Tensor) -> bool:
    experts, columns, width = w1.shape
    return tuple(first.shape) == (experts, columns) and tuple(second.shape) == (experts, width)


def _gates(module: nn.Module) -> Iterator[tuple[Activation, float, float]]:
    """Activations with alpha and limit, which are numbers that the module holds."""
    yield "silu", 0.0, 0.0
    yield "gelu", 0.0, 0.0
    held = [v for v in vars(module).values() if isinstance(v, float) and v > 0]
    for alpha, limit in dict.fromkeys((*itertools.permutations(held, 2), *_GATES)):
        yield "swigluoai", alpha, limit


def _reproduces(module: nn.Module, recipe: ExpertsRecipe) -> Match | None:
    """Compare on a CPU, whose products take every dtype: what is probed is the form, not a kernel.

    Sums are exact in any order, as two functions may differ in theirs: eighths in the first product, two terms in the
    second.
    """
    forward, device = recipe.build(type(module)), torch.device("cpu")
    experts = getattr(module, recipe.w1).shape[0]
    large = 1 if recipe.op == "fused_moe" else 8  # rows beyond every limit
    verdicts: list[Match | None] = []
    for dtype in dict.fromkeys((placement(module)[1], torch.float32)):
        with probing(device):
            two = torch.rand(experts, _WIDTH, _INNER).argsort(-1) < 2
            w1 = (torch.randint(-8, 9, (experts, 2 * _INNER, _WIDTH)) / 8).to(dtype)
            w2 = torch.where(two, torch.randn(two.shape), 0).to(dtype)
            if recipe.transposed:
                w1, w2 = w1.mT.contiguous(), w2.mT.contiguous()
            weights = {recipe.w1: w1, recipe.w2: w2}
            if recipe.biases is not None:
                weights[recipe.biases[0]] = (torch.randint(-8, 9, (experts, 2 * _INNER)) / 8).to(dtype)
                weights[recipe.biases[1]] = torch.randn(experts, _WIDTH).to(dtype)
            clone = stand_in(module, parameters=weights)
            ids = torch.rand(_TOKENS, experts).argsort(1)[:, : min(_CHOSEN, experts)]
            x = (large * torch.randint(-8, 9, (_TOKENS, _WIDTH)) / 8).to(dtype)
            args = x, ids, torch.rand(ids.shape, dtype=dtype)
            verdicts.append(run_both("experts", type(module).forward, forward, clone, *args))
            if verdicts[-1] is None:
                return None
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
