"""The raw arguments of `linear_cross_entropy`."""

from typing import Any, NamedTuple

from torch import Tensor

from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.ops.loss.entropy import Options


class LinearCrossEntropyArgs(NamedTuple):
    hidden: Tensor  # (M, H)
    weight: Tensor  # (V, H)
    target: Tensor  # (M,)
    bias: Tensor | None  # (V,)
    class_weight: Tensor | None  # (V,)
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float  # 0: none
    reduction: str
    chunk_rows: int  # 0: by memory
    need_dhidden: bool  # which gradients the forward computes, for a dloss of 1
    need_dweight: bool
    need_dbias: bool


class LinearCrossEntropyBackwardArgs(NamedTuple):
    hidden: Tensor  # (M, H)
    weight: Tensor  # (V, H)
    target: Tensor  # (M,)
    bias: Tensor | None  # (V,)
    class_weight: Tensor | None  # (V,)
    lse: Tensor  # (M,)
    totals: Tensor  # (3,)
    dloss: Tensor | None  # () or (M,)
    dlse: Tensor | None  # (M,)
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    reduction: str
    chunk_rows: int
    need_dhidden: bool
    need_dweight: bool
    need_dbias: bool


class LinearBucket(NamedTuple):
    """The sizes of a call, rows rounded up to a power of two."""

    M: int
    V: int
    H: int


def linear_bucket(args: Any) -> LinearBucket:
    """The bucket of a call."""
    classes, depth = args.weight.shape
    return LinearBucket(row_bucket(args.hidden.shape[0]), max(1, hint(classes)), max(1, hint(depth)))


def options_of(args: LinearCrossEntropyArgs | LinearCrossEntropyBackwardArgs) -> Options:
    """The options of the loss."""
    return Options(args.ignore_index, args.label_smoothing, args.z_loss, args.softcap, args.reduction)


def gradient_outputs(args: Any) -> tuple[Any, ...]:
    """Shapes and dtypes of dhidden, dweight, dbias; (0,) for those that are not wanted."""
    hidden, weight, bias = args.hidden, args.weight, args.bias
    return (
        (tuple(hidden.shape) if args.need_dhidden else (0,), hidden.dtype),
        (tuple(weight.shape) if args.need_dweight else (0,), weight.dtype),
        (
            tuple(bias.shape) if args.need_dbias and bias is not None else (0,),
            weight.dtype if bias is None else bias.dtype,
        ),
    )
