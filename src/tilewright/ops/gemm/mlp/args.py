"""The raw arguments of `gated_mlp`."""

from typing import Any, NamedTuple

from torch import Tensor

from tilewright.dispatch.bucket import hint, row_bucket

ACTIVATIONS = ("silu", "gelu_tanh", "gelu_erf", "relu2")


class GatedMlpArgs(NamedTuple):
    x: Tensor  # (..., H)
    w_gate: Tensor  # (I, H)
    w_up: Tensor  # (I, H)
    w_down: Tensor  # (O, I)
    activation: str
    recompute: bool


class GatedMlpBackwardArgs(NamedTuple):
    dy: Tensor  # (..., O)
    x: Tensor  # (..., H)
    w_gate: Tensor  # (I, H)
    w_up: Tensor  # (I, H)
    w_down: Tensor  # (O, I)
    gate: Tensor  # (..., I), or (0,) to compute it again
    up: Tensor  # as gate
    activation: str
    recompute: bool
    need_dx: bool
    need_dw_gate: bool
    need_dw_up: bool
    need_dw_down: bool

    @property
    def forward(self) -> GatedMlpArgs:
        """The arguments of the forward."""
        return GatedMlpArgs(self.x, self.w_gate, self.w_up, self.w_down, self.activation, self.recompute)

    @property
    def needs(self) -> tuple[bool, bool, bool, bool]:
        """Which gradients are wanted, in the order of x and the weights."""
        return self.need_dx, self.need_dw_gate, self.need_dw_up, self.need_dw_down


class GatedMlpBucket(NamedTuple):
    """The sizes of a call, rows rounded up to a power of two."""

    M: int
    H: int
    I: int  # noqa: E741  the field's name


def mlp_bucket(args: GatedMlpArgs | GatedMlpBackwardArgs) -> GatedMlpBucket:
    """The bucket of a call."""
    inner, width = args.w_gate.shape
    return GatedMlpBucket(row_bucket(args.x.numel() // max(1, width)), max(1, hint(width)), max(1, hint(inner)))


def outputs(args: GatedMlpArgs) -> tuple[Any, ...]:
    """Shapes and dtypes of y, and of gate and up, which are (0,) if the backward computes them again."""
    x, rows = args.x, tuple(args.x.shape[:-1])
    inner = ((0,) if args.recompute else (*rows, args.w_gate.shape[0]), x.dtype)
    return ((*rows, args.w_down.shape[0]), x.dtype), inner, inner


def gradients(args: GatedMlpBackwardArgs) -> tuple[Any, ...]:
    """Shapes and dtypes of the gradients of x and the weights; (0,) for those that are not wanted."""
    tensors = args.x, args.w_gate, args.w_up, args.w_down
    return tuple((tuple(t.shape) if need else (0,), t.dtype) for t, need in zip(tensors, args.needs, strict=True))
