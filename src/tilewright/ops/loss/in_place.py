"""Cross entropy whose forward writes the gradient over the logits: the raw op, and autograd around it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import RawOp
from tilewright.dispatch.bucket import hint
from tilewright.dispatch.derivatives import Function, has_tangent, vjp
from tilewright.dispatch.preference import resolve
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.loss import entropy
from tilewright.ops.loss.arguments import KERNELS, CrossEntropyArgs
from tilewright.ops.loss.entropy import Options


class InPlaceArgs(NamedTuple):
    """Rows with a unit stride, and the options.   totals: those of the batch of which these rows are a part, if any."""

    logits: Tensor  # (M, V), written
    target: Tensor  # (M,)
    weight: Tensor | None  # (V,)
    dloss: Tensor | None  # () or (M,); None: 1
    totals: Tensor | None  # (3,)
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float  # 0: none
    reduction: str


class InPlaceBucket(NamedTuple):
    """RowsBucket, and what a kernel may not take: class weights or a softcap; rows that are no whole vectors."""

    M: int
    N: int
    special: int
    aligned: int


def in_place_bucket(args: InPlaceArgs) -> InPlaceBucket:
    """The bucket of a call."""
    x, vector = args.logits, 16 // min(args.logits.itemsize, 16)
    sizes = (hint(x.shape[1]), *((hint(x.stride(0)),) if x.shape[0] != 1 else ()))
    aligned = all(size % vector == 0 for size in sizes) and rows.address(x) % 16 == 0
    special = args.weight is not None or args.softcap != 0
    return InPlaceBucket(*rows.rows_bucket(x), int(special), int(aligned))


class ScaleArgs(NamedTuple):
    gradient: Tensor  # (M, N), or (N,), with a unit stride; written
    scale: Tensor  # ()


def _outputs(args: InPlaceArgs) -> tuple[Any, ...]:
    dtype = rows.accumulate_dtype(args.logits.dtype)
    return (entropy.loss_shape(args.target, args.reduction), dtype), (args.target.shape, dtype)


def _in_place(args: InPlaceArgs) -> tuple[Tensor, Tensor]:
    options = Options(*args[5:])

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        losses, lse = entropy.row_losses(x, args.target, args.weight, options)
        totals = entropy.totals_of(x, args.target, args.weight, options) if args.totals is None else args.totals
        return entropy.reduced(losses, lse, totals.to(lse.dtype), options), lse

    loss, lse = function(args.logits)
    dloss = torch.ones_like(loss) if args.dloss is None else args.dloss.to(loss.dtype)
    (gradient,) = vjp(lambda x: function(x)[0], (args.logits.detach(),), (dloss,))
    args.logits.copy_(gradient)
    return loss, lse


def _scale(args: ScaleArgs) -> None:
    args.gradient.mul_(args.scale)


IN_PLACE = RawOp(
    "cross_entropy",
    "in_place",
    InPlaceArgs,
    package="tilewright.ops.loss",
    kernels=KERNELS,
    outputs=_outputs,
    reference=_in_place,
    bucket=in_place_bucket,
    bucket_names=InPlaceBucket._fields,
    count=2,
    mutates=("logits",),
)
"""Loss and logsumexp of each row, and the gradient of the loss, times dloss, over the logits."""

SCALE = RawOp(
    "cross_entropy",
    "scale",
    ScaleArgs,
    package="tilewright.ops.loss",
    kernels=KERNELS,
    outputs=lambda args: (),
    reference=_scale,
    bucket=lambda args: rows.rows_bucket(args.gradient),
    bucket_names=rows.RowsBucket._fields,
    count=0,
    mutates=("gradient",),
)
"""A gradient that a forward has written, times the gradient of the loss: what a backward has left to do."""


def has_rows(x: Tensor) -> bool:
    """Are the elements of each row of (M, N) side by side, and rows apart?  torch's own gradients may be transposed."""
    return x.stride(-1) == 1 and (x.dim() < 2 or x.stride(0) >= x.shape[1])


def scaled(gradient: Tensor, dloss: Tensor) -> Tensor:
    """gradient * dloss.  Nothing is read or written where dloss is 1, which the device finds out; else the product
    takes the place of `gradient`, unless the graph is kept and needs it again.
    """
    is_kept = torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph()
    if is_kept or not has_rows(gradient):
        return gradient * dloss
    SCALE(gradient, dloss.detach(), *resolve(None))
    return gradient


def loss_in_place(args: CrossEntropyArgs, backend: str | None) -> Tensor:
    """The loss of `cross_entropy(inplace_grad=True)`, whose arguments were checked and where a gradient is wanted."""
    if args.reduction == "none":
        raise InputError(
            "cross_entropy: inplace_grad needs the gradient of the loss in the forward, and reduction='none' has none "
            'yet. Use "mean" or "sum".'
        )
    if has_tangent(args.logits):
        raise InputError(
            "cross_entropy: inplace_grad has no forward mode, and logits has a tangent. Drop inplace_grad."
        )
    if args.logits.is_leaf:
        raise InputError("cross_entropy: inplace_grad would write over logits that are a leaf. Drop inplace_grad.")
    if (args.logits.shape[1] > 1 and args.logits.stride(1) != 1) or 0 in args.logits.stride():
        raise InputError(
            f"cross_entropy: inplace_grad needs a unit stride in each row and memory for each, logits has strides "
            f"{tuple(args.logits.stride())}. Pass them contiguous."
        )
    loss: Tensor = _InPlace.apply(args.logits, args, backend)
    return loss


class _InPlace(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, args: CrossEntropyArgs, backend: str | None) -> Tensor:
        written = logits.detach()  # the same memory and version: a backward that saved logits learns of the write
        loss: Tensor = IN_PLACE(written, *args[1:3], None, None, *args[3:], *resolve(backend))[0]
        torch.autograd.graph.increment_version(written)
        ctx.save_for_backward(written)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise InputError(
                "cross_entropy(inplace_grad=True) has no gradient of its gradient: the logits are overwritten. "
                "Drop inplace_grad."
            )
        (gradient,) = ctx.saved_tensors
        return scaled(gradient, dloss), None, None
