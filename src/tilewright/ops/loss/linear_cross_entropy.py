"""The last linear layer of a language model and its cross entropy, without all logits at any time."""

from typing import Any

from torch import Tensor

from tilewright.dispatch import Contract, Gradient, Promises, RawOp, call, dispatch, register
from tilewright.dispatch.arguments import as_int
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.loss import entropy
from tilewright.ops.loss.linear import chunks, one_pass, samples
from tilewright.ops.loss.linear import reference as plain
from tilewright.ops.loss.linear.args import (
    LinearBucket,
    LinearCrossEntropyArgs,
    LinearCrossEntropyBackwardArgs,
    gradient_outputs,
    linear_bucket,
    options_of,
)

OP = "linear_cross_entropy"


@dispatch(OP)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    chunk_rows: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """`cross_entropy(hidden @ weight^T + bias, target)`, by chunks of rows: no more than one chunk of logits exists.

    hidden: (..., H) bf16|fp16|fp32   weight: (V, H) of its dtype   bias: (V,) of its dtype.
    target: (...) int64|int32.   class_weight: (V,), the `weight` of `cross_entropy`; other options as there.
    Logits are rounded to the dtype of hidden, the loss is computed in float32.   Returns float32: () or, for "none",
    (...).
    Gradients of hidden, weight and bias.   For "mean" and "sum" the forward computes them, while it has the logits, and
    the backward only multiplies them by that of the loss; for "none" the backward computes the logits again.   That of
    weight is rounded to its dtype after each chunk.   Beside arguments and gradients a call holds one chunk of logits:
    rows_of_chunk * V elements, at most 512 MiB.
    chunk_rows: rows of a chunk; by default as many as fit into 512 MiB, in chunks of one size.
    backend: preferred by the products and the losses that this op is made of ("cuda", "triton", "torch").
    Raises InputError for other dtypes, shapes and options, as `cross_entropy`.
    Source: Hsu et al., "Liger Kernel", 2024.
    """
    if isinstance(hidden, Tensor) and isinstance(target, Tensor) and hidden.dim() not in (0, 2):
        if target.shape != hidden.shape[:-1]:
            raise InputError(f"{OP}: target is {tuple(target.shape)}; needs {tuple(hidden.shape[:-1])}, as hidden.")
        rows_of_hidden, rows_of_target = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    else:
        rows_of_hidden, rows_of_target = hidden, target
    cap = entropy.as_softcap(OP, softcap)
    chunk = 0 if chunk_rows is None else as_int(OP, "chunk_rows", chunk_rows)
    if chunk_rows is not None and chunk < 1:
        raise InputError(f"{OP}: chunk_rows is {chunk_rows}; needs 1 or more, or None.")
    args = LinearCrossEntropyArgs(
        rows_of_hidden, weight, rows_of_target, bias, class_weight, ignore_index, label_smoothing, z_loss, cap,
        reduction, chunk, need_dhidden=False, need_dweight=False, need_dbias=False,
    )  # fmt: skip
    if one_pass.suits(args):
        result: Tensor = one_pass.loss(CONTRACT, args, backend)
        return result
    loss: Tensor = call(CONTRACT, args, backend)[0]
    return loss.view(target.shape) if reduction == "none" and target.dim() != 1 else loss


def reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    chunk_rows: int | None = None,
) -> Tensor:
    """Plain torch, with all logits at once."""
    args = LinearCrossEntropyArgs(
        hidden.reshape(-1, hidden.shape[-1]), weight, target.reshape(-1), bias, class_weight, ignore_index,
        label_smoothing, z_loss, softcap or 0.0, reduction, 0, need_dhidden=False, need_dweight=False, need_dbias=False,
    )  # fmt: skip
    return plain.forward(args)[0].view(entropy.loss_shape(target, reduction))


def _outputs(args: LinearCrossEntropyArgs) -> tuple[Any, ...]:
    dtype = rows.accumulate_dtype(args.hidden.dtype)
    loss = entropy.loss_shape(args.target, args.reduction)
    return (loss, dtype), (args.target.shape, dtype), ((entropy.TOTALS,), dtype), *gradient_outputs(args)


FORWARD = RawOp(
    OP,
    "fwd",
    LinearCrossEntropyArgs,
    package="tilewright.ops.loss",
    outputs=_outputs,
    reference=plain.forward,
    bucket=linear_bucket,
    bucket_names=LinearBucket._fields,
    count=6,
    compose=chunks.forward,
)
BACKWARD = RawOp(
    OP,
    "bwd",
    LinearCrossEntropyBackwardArgs,
    package="tilewright.ops.loss",
    outputs=gradient_outputs,
    reference=plain.backward,
    bucket=linear_bucket,
    bucket_names=LinearBucket._fields,
    count=3,
    compose=chunks.backward,
)


def check(args: LinearCrossEntropyArgs) -> None:
    """Raise InputError for what the docstring of `linear_cross_entropy` excludes."""
    hidden, weight, bias = args.hidden, args.weight, args.bias
    tensors = {"hidden": hidden, "weight": weight, **({} if bias is None else {"bias": bias})}
    rows.check_floating(OP, **tensors)
    for name, t in tensors.items():
        if t.dtype != hidden.dtype:
            raise InputError(f"{OP}: {name} is {t.dtype}, hidden is {hidden.dtype}; they must have one dtype.")
    if hidden.dim() != 2 or hidden.shape[1] == 0:
        raise InputError(f"{OP}: hidden is {tuple(hidden.shape)}; needs (..., H) with one column or more.")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1] or weight.shape[0] == 0:
        raise InputError(f"{OP}: weight is {tuple(weight.shape)}; needs (V, {hidden.shape[1]}), as hidden has columns.")
    classes = weight.shape[0]
    if bias is not None and tuple(bias.shape) != (classes,):
        raise InputError(f"{OP}: bias is {tuple(bias.shape)}; needs ({classes},), a number for each row of weight.")
    entropy.check_options(OP, options_of(args))
    entropy.check_targets(OP, args.target, tuple(hidden.shape[:1]), hidden.device)
    entropy.check_weight(OP, args.class_weight, classes, hidden.device)
    entropy.check_range(OP, args.target, classes, args.ignore_index)


def _save(args: LinearCrossEntropyArgs, outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    return (*args[:5], outputs[1], outputs[2])


def _raw_args(grads: Any, saved: Any, args: LinearCrossEntropyArgs, needs: Any) -> LinearCrossEntropyBackwardArgs:
    numbers = (*grads[:2], *options_of(args), args.chunk_rows)  # the other outputs have no gradient
    flags = bool(needs.hidden), bool(needs.weight), bool(needs.bias)
    return LinearCrossEntropyBackwardArgs(*saved, *numbers, *flags)  # type: ignore[call-arg]


CONTRACT = register(
    Contract(
        name=OP,
        family="loss",
        summary="the last linear layer and its cross entropy, by chunks of rows",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=samples.inputs,
        cost=samples.cost,
        gradient=Gradient(
            BACKWARD, inputs=("hidden", "weight", "bias"), save=_save, raw_args=_raw_args, recomputes=False
        ),
        workloads=samples.WORKLOADS,
        cpu_workloads=samples.CPU_WORKLOADS,
        edge_cases=samples.EDGE_CASES,
        bad_inputs=samples.BAD_INPUTS,
        batch_dim=None,
        promises=Promises(batch_invariant=False),
        other_gradients={"weight": 5.0},  # rounded after each chunk
    )
)
