"""Cross entropy of logits and class indices."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import Contract, Gradient, Promises, RawOp, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.loss import entropy, in_place, samples
from tilewright.ops.loss.arguments import KERNELS, CrossEntropyArgs, check_arguments, raw_arguments
from tilewright.ops.loss.entropy import Options

OP = "cross_entropy"


class CrossEntropyBackwardArgs(NamedTuple):
    logits: Tensor  # (M, V)
    target: Tensor  # (M,)
    weight: Tensor | None  # (V,)
    lse: Tensor  # (M,)
    rest: Tensor | None  # (M,), what of the exact lse was rounded off
    totals: Tensor  # (3,)
    dloss: Tensor | None  # () or (M,)
    dlse: Tensor | None  # (M,)
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    reduction: str


@dispatch(OP)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_z_loss: bool = False,
    inplace_grad: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """-log softmax(x)[target], x = softcap * tanh(logits / softcap) where a softcap is given, as
    `torch.nn.functional.cross_entropy` with classes in the last dimension; computed in float32.

    logits: (..., V) bf16|fp16|fp32; rows without one stride, or without a unit stride in a row, cost a copy.
    target: (...) int64|int32, classes 0 to V - 1, or `ignore_index`: such a row has loss 0 and gradient 0.
    Returns float32: () for "mean" and "sum", (...) for "none".  The mean is over rows that are not ignored, by the
    weights of their targets; NaN where there are none.   inf and NaN give what they give in torch.
    weight: (V,) of the classes, without a gradient.   label_smoothing: 0 to 1, the part spread over all classes.
    z_loss: adds z_loss * logsumexp(x)^2, its mean over rows whatever their weights (PaLM).
    return_z_loss: returns (loss, the z-loss in it) instead.

    Gradient of logits, for every reduction.   inplace_grad: where a gradient is wanted, the forward writes it over the
    logits, for a gradient 1 of the loss, and the backward only multiplies it by that of the loss.  Who else needs the
    logits in a backward gets torch's error about a changed tensor.  For "mean" and "sum", and logits that are no leaf;
    without gradients of gradients, forward mode and return_z_loss.  torch.compile ignores it.
    A class outside 0 to V - 1 gives NaN on a GPU, and InputError under TILEWRIGHT_CHECK=1 and on a CPU.
    backend: run on exactly this backend ("cuda" where inplace_grad is, "triton", "torch") or raise BackendError.
    Raises InputError for other dtypes, shapes and options.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    args = raw_arguments(OP, logits, target, weight, ignore_index, label_smoothing, z_loss, softcap, reduction)
    if inplace_grad and torch.is_grad_enabled() and logits.requires_grad and not torch.compiler.is_compiling():
        if return_z_loss:
            raise InputError("cross_entropy: inplace_grad and return_z_loss do not go together. Drop one of them.")
        CONTRACT.check(*args)
        return in_place.loss_in_place(args, backend)
    loss, lse, _, totals = call(CONTRACT, args, backend)
    if reduction == "none" and target.dim() != 1:
        loss = loss.view(target.shape)
    if not return_z_loss:
        return loss
    z = z_loss * lse.square()
    if reduction == "none":
        return loss, z.view(target.shape)
    return loss, z.sum() / totals[1] if reduction == "mean" else z.sum()


def reference(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_z_loss: bool = False,
    inplace_grad: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Plain torch, in float32."""
    options = Options(ignore_index, label_smoothing, z_loss, softcap or 0.0, reduction)
    loss, lse, totals = entropy.forward(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), weight, options)
    loss = loss.view(entropy.loss_shape(target, reduction))
    if not return_z_loss:
        return loss
    z = z_loss * lse.square()
    if reduction == "none":
        return loss, z.view(target.shape)
    return loss, z.sum() / totals[1] if reduction == "mean" else z.sum()


def _forward(args: CrossEntropyArgs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss, lse, totals = entropy.forward(args.logits, args.target, args.weight, Options(*args[3:]))
    return loss, lse, torch.zeros_like(lse), totals


def _backward(args: CrossEntropyBackwardArgs) -> Tensor:
    options = Options(*args[8:])

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        losses, lse = entropy.row_losses(x, args.target, args.weight, options)
        return entropy.reduced(losses, lse, args.totals.detach(), options), lse  # of a larger batch, it may be

    return vjp(function, (args.logits,), (args.dloss, args.dlse))[0]


def _outputs(args: CrossEntropyArgs) -> tuple[Any, ...]:
    dtype = rows.accumulate_dtype(args.logits.dtype)
    loss = entropy.loss_shape(args.target, args.reduction)
    return (loss, dtype), (args.target.shape, dtype), (args.target.shape, dtype), ((entropy.TOTALS,), dtype)


FORWARD = RawOp(
    OP,
    "fwd",
    CrossEntropyArgs,
    package="tilewright.ops.loss",
    kernels=KERNELS,
    outputs=_outputs,
    reference=_forward,
    bucket=lambda args: rows.rows_bucket(args.logits),
    bucket_names=rows.RowsBucket._fields,
    count=4,
)
BACKWARD = RawOp(
    OP,
    "bwd",
    CrossEntropyBackwardArgs,
    package="tilewright.ops.loss",
    kernels=KERNELS,
    outputs=lambda args: ((args.logits.shape, args.logits.dtype),),
    reference=_backward,
    bucket=lambda args: rows.rows_bucket(args.logits),
    bucket_names=rows.RowsBucket._fields,
)


def check(args: CrossEntropyArgs) -> None:
    """Raise InputError for what the docstring of `cross_entropy` excludes."""
    check_arguments(OP, args)


def _save(args: CrossEntropyArgs, outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    _, lse, rest, totals = outputs
    return args.logits, args.target, args.weight, lse, rest, totals


def _raw_args(grads: Any, saved: Any, args: CrossEntropyArgs, needs: Any) -> CrossEntropyBackwardArgs:
    dloss, dlse, *_ = grads  # the others are no functions of the logits
    return CrossEntropyBackwardArgs(*saved, dloss, dlse, *args[3:])  # type: ignore[call-arg]


CONTRACT = register(
    Contract(
        name=OP,
        family="loss",
        summary="cross entropy of logits, with all options of a language model's loss",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=samples.inputs,
        cost=samples.cost,
        gradient=Gradient(BACKWARD, inputs=("logits",), save=_save, raw_args=_raw_args),
        workloads=samples.WORKLOADS,
        cpu_workloads=samples.CPU_WORKLOADS,
        edge_cases=samples.EDGE_CASES,
        bad_inputs=samples.BAD_INPUTS,
        batch_dim=None,
        promises=Promises(batch_invariant=False),
    )
)
