"""MLPs: down(act(gate(x)) * up(x)), with gate and up as two linears or packed in one; and down(relu(up(x))^2).

Which linear is the gate, which activation it is, which half of a packed projection comes first and what a number of
the module multiplies is not read from names: every assignment is tried on a stand-in with small random linears and
numbers, and only the one that reproduces the module's own forward is used. The linears themselves stay modules and are
called as modules, so quantised or adapter linears keep working.
"""

import dataclasses
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
    only_argument,
    placement,
    probing,
    run_both,
    stand_in,
    weakest,
)

Activation = Literal["silu", "gelu", "gelu_tanh"]
_WIDTH, _INNER = 8, 12  # of the stand-in's linears: different, so that a swapped pair raises


@dataclass(frozen=True)
class GatedMlpRecipe:
    """down(act(gate(x)) * up(x)) by `ops.swiglu` or `ops.geglu`."""

    gate: str
    up: str
    down: str
    activation: Activation
    argument: str
    backend: str | None

    @property
    def op(self) -> str:
        """Name of the op in the middle."""
        return "swiglu" if self.activation == "silu" else "geglu"

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """forward(self, x) -> y: (..., H)."""
        gate, up, down, backend = self.gate, self.up, self.down, self.backend
        approximate = "tanh" if self.activation == "gelu_tanh" else "none"

        def swiglu(self: nn.Module, x: Tensor) -> Tensor:
            if stays_with_torch("swiglu", x, backend):
                return cls.forward(self, x)
            return getattr(self, down)(ops.swiglu(getattr(self, gate)(x), getattr(self, up)(x), backend=backend))

        def geglu(self: nn.Module, x: Tensor) -> Tensor:
            if stays_with_torch("swiglu", x, backend):
                return cls.forward(self, x)
            inner = ops.geglu(getattr(self, gate)(x), getattr(self, up)(x), approximate=approximate, backend=backend)
            return getattr(self, down)(inner)

        return rename_argument(swiglu if self.activation == "silu" else geglu, "x", self.argument)

    def __str__(self) -> str:
        return f"ops.{self.op}, {self.activation}({self.gate}) * {self.up}"


@dataclass(frozen=True)
class PackedMlpRecipe:
    """down(act(first half) * second half) of one packed projection, by `ops.silu_and_mul` or `ops.gelu_and_mul`."""

    packed: str
    down: str
    activation: Activation
    argument: str
    backend: str | None

    @property
    def op(self) -> str:
        """Name of the op in the middle."""
        return "silu_and_mul" if self.activation == "silu" else "gelu_and_mul"

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """forward(self, x) -> y: (..., H)."""
        packed, down, backend = self.packed, self.down, self.backend
        approximate = "tanh" if self.activation == "gelu_tanh" else "none"

        def silu_and_mul(self: nn.Module, x: Tensor) -> Tensor:
            if stays_with_torch("swiglu", x, backend):
                return cls.forward(self, x)
            return getattr(self, down)(ops.silu_and_mul(getattr(self, packed)(x), backend=backend))

        def gelu_and_mul(self: nn.Module, x: Tensor) -> Tensor:
            if stays_with_torch("swiglu", x, backend):
                return cls.forward(self, x)
            inner = ops.gelu_and_mul(getattr(self, packed)(x), approximate=approximate, backend=backend)
            return getattr(self, down)(inner)

        return rename_argument(silu_and_mul if self.activation == "silu" else gelu_and_mul, "x", self.argument)

    def __str__(self) -> str:
        return f"ops.{self.op}, {self.activation} on the first half of {self.packed}"


@dataclass(frozen=True)
class ScaledMlpRecipe:
    """down(silu(gate(x) * a) * up(x)) * b by `ops.swiglu`; a and b are numbers of the module, read at every call."""

    gate: str
    up: str
    down: str
    gate_multiplier: str
    multiplier: str
    argument: str
    backend: str | None

    op = "swiglu"

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """forward(self, x) -> y: (..., H)."""
        gate, up, down, backend = self.gate, self.up, self.down, self.backend
        gate_multiplier, multiplier = self.gate_multiplier, self.multiplier

        def swiglu(self: nn.Module, x: Tensor) -> Tensor:
            if stays_with_torch("swiglu", x, backend):
                return cls.forward(self, x)
            factor = getattr(self, gate_multiplier)
            inner = ops.swiglu(getattr(self, gate)(x), getattr(self, up)(x), gate_multiplier=factor, backend=backend)
            return getattr(self, down)(inner) * getattr(self, multiplier)

        return rename_argument(swiglu, "x", self.argument)

    def __str__(self) -> str:
        return f"ops.{self.op}, silu({self.gate} * {self.gate_multiplier}) * {self.up}, times {self.multiplier}"


@dataclass(frozen=True)
class SquaredReluMlpRecipe:
    """down(relu(up(x))^2) by `ops.relu2`."""

    up: str
    down: str
    argument: str
    backend: str | None

    op = "relu2"

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """forward(self, x) -> y: (..., H)."""
        up, down, backend = self.up, self.down, self.backend

        def relu2(self: nn.Module, x: Tensor) -> Tensor:
            if stays_with_torch("relu2", x, backend):
                return cls.forward(self, x)
            return getattr(self, down)(ops.relu2(getattr(self, up)(x), backend=backend))

        return rename_argument(relu2, "x", self.argument)

    def __str__(self) -> str:
        return f"ops.{self.op}, relu({self.up})^2"


MlpRecipe = GatedMlpRecipe | PackedMlpRecipe | ScaledMlpRecipe | SquaredReluMlpRecipe


def find(module: nn.Module, backend: str | None) -> Proposal | None:
    """Propose an MLP; None if the module's children have other shapes, or no gate and another activation.

    Raises NotReplaceable if only the shapes fit those of a gated one.
    """
    linears = {name: shape for name, m in module._modules.items() if (shape := _linear_shape(m))}
    others = [m for name, m in module._modules.items() if m is not None and name not in linears]
    argument = only_argument(module)
    numbers = [name for name, value in vars(module).items() if isinstance(value, float)]
    candidates = list(_candidates(linears, numbers, argument or ""))
    if not candidates or module._parameters or any(True for m in others for _ in m.parameters()):
        return None
    reason = "its forward takes more than one input" if argument is None else obstacle(module)
    try:
        best = None if reason else _best(module, candidates)
    except NotReplaceable as left:
        best, reason = None, str(left)
    if best is None and isinstance(candidates[-1], SquaredReluMlpRecipe):
        return None  # no gate: most such MLPs have another activation, and other modules have such layers too
    if argument is None and "mlp" not in type(module).__name__.lower():
        return None  # attention with merged projections has linears of such shapes too
    if best is None:
        raise NotReplaceable(
            "mlp",
            reason or "is not down(act(gate(x)) * up(x)) with SiLU or GELU, gate first where packed, and no dropout",
        )
    recipe, verdict = best
    return Proposal("mlp", dataclasses.replace(recipe, backend=backend), (recipe.op,), f"{recipe} ({verdict})")


def _best(module: nn.Module, candidates: list[MlpRecipe]) -> tuple[MlpRecipe, Match] | None:
    """The first recipe that gives the module's bits, else the first that agrees to rounding."""
    best: tuple[MlpRecipe, Match] | None = None
    for recipe in candidates:
        verdict = _reproduces(module, recipe)
        if verdict == "bitwise":
            return recipe, verdict
        if verdict and best is None:
            best = recipe, verdict
    return best


def _linear_shape(module: nn.Module | None) -> tuple[int, int] | None:
    """(in_features, out_features) of a linear layer, quantised or not; None for other modules."""
    shape = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    return (shape[0], shape[1]) if isinstance(shape[0], int) and isinstance(shape[1], int) else None


def _candidates(linears: dict[str, tuple[int, int]], numbers: list[str], argument: str) -> Iterator[MlpRecipe]:
    """Every assignment of roles that the shapes allow.   numbers: attributes that may multiply."""
    activations: tuple[Activation, ...] = ("silu", "gelu_tanh", "gelu")
    if len(linears) == 3:
        for gate, up, down in itertools.permutations(linears):
            if linears[gate] == linears[up] and linears[down][0] == linears[gate][1]:
                for factors in itertools.permutations(numbers, 2):
                    yield ScaledMlpRecipe(gate, up, down, *factors, argument, "torch")
                for activation in activations:
                    yield GatedMlpRecipe(gate, up, down, activation, argument, "torch")
    elif len(linears) == 2:
        for up, down in itertools.permutations(linears):
            if linears[up][1] == 2 * linears[down][0]:
                for activation in activations:
                    yield PackedMlpRecipe(up, down, activation, argument, "torch")
            elif linears[up] == linears[down][::-1]:
                yield SquaredReluMlpRecipe(up, down, argument, "torch")


def _reproduces(module: nn.Module, recipe: MlpRecipe) -> Match | None:
    """Compare in both modes, training and evaluation: a functional dropout in the module must not be lost."""
    device, own_dtype = placement(module)
    forward = recipe.build(type(module))
    verdicts: list[Match | None] = []
    for dtype in dict.fromkeys((own_dtype, torch.float32)):
        with probing(device):
            clone = stand_in(module, children=_small_linears(recipe, device, dtype))
            if isinstance(recipe, ScaledMlpRecipe):  # numbers of 1 would hide what they multiply
                vars(clone).update({recipe.gate_multiplier: 0.7, recipe.multiplier: 1.3})
            x = 2 * torch.randn(3, 5, _WIDTH, device=device, dtype=dtype)
            for training in (False, True):
                clone.train(training)
                verdicts.append(run_both("mlp", type(module).forward, forward, clone, x))
    return weakest(verdicts)


def _small_linears(recipe: MlpRecipe, device: torch.device, dtype: torch.dtype) -> dict[str, nn.Module]:
    down = nn.Linear(_INNER, _WIDTH, device=device, dtype=dtype)
    if isinstance(recipe, PackedMlpRecipe):
        return {recipe.packed: nn.Linear(_WIDTH, 2 * _INNER, device=device, dtype=dtype), recipe.down: down}
    if isinstance(recipe, SquaredReluMlpRecipe):
        return {recipe.up: nn.Linear(_WIDTH, _INNER, device=device, dtype=dtype), recipe.down: down}
    gate, up = (nn.Linear(_WIDTH, _INNER, device=device, dtype=dtype) for _ in range(2))
    return {recipe.gate: gate, recipe.up: up, recipe.down: down}
