"""Cross entropy that writes the gradient over the logits."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import Contract, RawOp, call_in_place, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.loss import entropy, samples
from tilewright.ops.loss.arguments import CrossEntropyArgs, check_arguments, raw_arguments
from tilewright.ops.loss.entropy import Options

OP = "cross_entropy_"


class CrossEntropyInPlaceArgs(NamedTuple):
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


@dispatch(OP)
def cross_entropy_(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    dloss: Tensor | None = None,
    totals: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """`cross_entropy`, and its gradient with respect to the logits is written over the logits, in one launch of rows.

    logits: (..., V) bf16|fp16|fp32, written; rows without one stride, or without a unit stride inside, cost two copies.
    dloss: the gradient of the loss, float32, () for "mean" and "sum", (...) for "none"; None: ones.
    totals: (3,) float32, of a batch that these rows are a part of: the weights of its rows, the number of its rows and
    the weights of all classes.  Losses of the parts of a batch then add up to that of "mean".
    Other arguments, and the loss that is returned, as in `cross_entropy`.   The op itself has no gradient.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError as `cross_entropy`, for logits that require a gradient or share memory, and for another dloss.
    """
    written, flat, dloss = logits, target, dloss
    if isinstance(logits, Tensor) and logits.dim() > 0:
        written = _rows(logits)
        if isinstance(target, Tensor) and logits.dim() != 2:
            if target.shape != logits.shape[:-1]:
                raise InputError(f"{OP}: target is {tuple(target.shape)}; needs {tuple(logits.shape[:-1])}, as logits.")
            flat = target.reshape(-1)
        if isinstance(dloss, Tensor) and dloss.dim() != 0 and dloss.shape == logits.shape[:-1]:
            dloss = dloss.reshape(-1)
    args = raw_arguments(OP, written, flat, weight, ignore_index, label_smoothing, z_loss, softcap, reduction)
    loss: Tensor = call_in_place(CONTRACT, in_place_args(args, dloss, totals), backend)[0]
    if written.data_ptr() != logits.data_ptr():
        logits.copy_(written.view(logits.shape))
    return loss.view(target.shape) if reduction == "none" else loss


def in_place_args(args: CrossEntropyArgs, dloss: Tensor | None, totals: Tensor | None) -> CrossEntropyInPlaceArgs:
    """The arguments of this raw op, from those of `cross_entropy`."""
    return CrossEntropyInPlaceArgs(*args[:3], dloss, totals, *args[3:])


def _rows(logits: Tensor) -> Tensor:
    """Logits as rows with a unit stride, a copy where they are none; what has no memory is for the checks."""
    if 0 in (stride for n, stride in zip(logits.shape, logits.stride(), strict=True) if n > 1):
        return logits
    rows_of_logits = logits if logits.dim() == 2 else logits.reshape(-1, logits.shape[-1])
    return rows_of_logits if rows_of_logits.stride(-1) == 1 or logits.shape[-1] <= 1 else rows_of_logits.contiguous()


def reference(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    dloss: Tensor | None = None,
    totals: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Plain torch, in float32."""
    flat = target.reshape(-1)
    args = raw_arguments(
        OP, logits.view(-1, logits.shape[-1]), flat, weight, ignore_index, label_smoothing, z_loss, softcap, reduction
    )
    dloss = None if dloss is None else dloss.reshape(entropy.loss_shape(flat, reduction))
    loss, _ = _forward(in_place_args(args, dloss, totals))
    return loss.view(entropy.loss_shape(target, reduction))


def _forward(args: CrossEntropyInPlaceArgs) -> tuple[Tensor, Tensor]:
    options = Options(*args[5:])
    # In inference mode: autograd saves no tensors of it
    args = args._make(t.clone() if isinstance(t, Tensor) and i and t.is_inference() else t for i, t in enumerate(args))

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        rows_of_x, lse = entropy.row_losses(x, args.target, args.weight, options)
        totals = entropy.totals_of(x, args.target, args.weight, options) if args.totals is None else args.totals
        return entropy.reduced(rows_of_x, lse, totals.to(lse.dtype), options), lse

    loss, lse = function(args.logits)
    dloss = torch.ones_like(loss) if args.dloss is None else args.dloss.to(loss.dtype)
    (gradient,) = vjp(lambda x: function(x)[0], (args.logits.detach(),), (dloss,))
    args.logits.copy_(gradient)
    return loss, lse


def _outputs(args: CrossEntropyInPlaceArgs) -> tuple[Any, ...]:
    dtype = rows.accumulate_dtype(args.logits.dtype)
    return (entropy.loss_shape(args.target, args.reduction), dtype), (args.target.shape, dtype)


KERNELS = ("triton.cross_entropy_in_place", "triton.scale_gradient")

FORWARD = RawOp(
    OP,
    "fwd",
    CrossEntropyInPlaceArgs,
    package="tilewright.ops.loss",
    kernels=KERNELS,
    outputs=_outputs,
    reference=_forward,
    bucket=lambda args: rows.rows_bucket(args.logits),
    bucket_names=rows.RowsBucket._fields,
    count=2,
    mutates=("logits",),
)


def check(args: CrossEntropyInPlaceArgs) -> None:
    """Raise InputError for what the docstring of `cross_entropy_` excludes."""
    check_arguments(OP, CrossEntropyArgs(*args[:3], *args[5:]))
    logits, dloss = args.logits, args.dloss
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise InputError(f"{OP}: logits has strides {tuple(logits.stride())}; needs a unit stride in each row.")
    dtype = rows.accumulate_dtype(logits.dtype)
    entropy.check_numbers(OP, "dloss", dloss, entropy.loss_shape(args.target, args.reduction), dtype, logits.device)
    entropy.check_numbers(OP, "totals", args.totals, (entropy.TOTALS,), dtype, logits.device)


class ScaleArgs(NamedTuple):
    gradient: Tensor  # (M, N), written
    scale: Tensor  # ()


def _scale(args: ScaleArgs) -> None:
    args.gradient.mul_(args.scale)


SCALE = RawOp(
    OP,
    "bwd",
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

CONTRACT = register(
    Contract(
        name=OP,
        family="loss",
        summary="cross entropy of logits, and its gradient written over them",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=samples.in_place_inputs,
        cost=samples.in_place_cost,
        workloads=samples.IN_PLACE_WORKLOADS,
        cpu_workloads=samples.IN_PLACE_CPU_WORKLOADS,
        edge_cases=samples.IN_PLACE_EDGE_CASES,
        bad_inputs=samples.IN_PLACE_BAD_INPUTS,
        batch_dim=None,
    )
)
