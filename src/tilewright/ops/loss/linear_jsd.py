"""The last linear layers of a student and of its teacher, and the divergence of their distributions, without all logits
at any time.
"""

from typing import Any

from torch import Tensor

from tilewright.dispatch import Contract, Gradient, Promises, RawOp, call, dispatch, register
from tilewright.dispatch.arguments import as_int
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.loss import divergence, entropy
from tilewright.ops.loss.linear import jsd_chunks, jsd_samples, one_pass
from tilewright.ops.loss.linear.args import LinearBucket, gradient_outputs, linear_bucket
from tilewright.ops.loss.linear.jsd_args import LinearJsdArgs, LinearJsdBackwardArgs, options_of

OP = "linear_jsd"


@dispatch(OP)
def linear_jsd(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "batchmean",
    kind: str = "jsd",
    chunk_rows: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """`jsd(hidden @ weight^T + bias, teacher_hidden @ teacher_weight^T + teacher_bias, target)`, by chunks of rows: no
    more than one chunk of logits of each side exists.

    hidden: (..., H) bf16|fp16|fp32   weight: (V, H)   bias: (V,), of the student.
    teacher_hidden: (..., H_t)   teacher_weight: (V, H_t)   teacher_bias: (V,), of the teacher, whose H_t may differ.
    All of one dtype.   target: (...) int64|int32, of which only `ignore_index` is read; other options as in `jsd`.
    hard_weight: 0 to 1; the loss is (1 - hard_weight) * jsd + hard_weight * cross entropy of the student, whose classes
    are then those of target.   Not with reduction="mean", the mean over elements.
    Logits are rounded to the dtype of hidden, the divergence is computed in float32.   Returns float32: () or, for
    "none", (...).
    Gradients of hidden, weight and bias; the teacher has none, and is refused with requires_grad.   For a reduction to
    one number the forward computes them, while it has the logits, and the backward only multiplies them by that of the
    loss; for "none" the backward computes the logits again.   That of weight is rounded to its dtype after each chunk.
    chunk_rows: rows of a chunk; by default as many as fit into 512 MiB for both sides, in chunks of one size.
    backend: preferred by the products and divergences that this op is made of ("cuda", "triton", "torch").
    Raises InputError for other dtypes, shapes and options, as `jsd`.
    Source: Hsu et al., "Liger Kernel", 2024; Agarwal et al., "On-Policy Distillation of Language Models", 2024.
    """
    shape: tuple[int, ...] | None = None
    if isinstance(hidden, Tensor) and isinstance(teacher_hidden, Tensor) and hidden.dim() not in (0, 2):
        shape = tuple(hidden.shape[:-1])
        leading = {"teacher_hidden": tuple(teacher_hidden.shape[:-1])}
        if isinstance(target, Tensor):
            leading["target"] = tuple(target.shape)
        for name, rows_of in leading.items():
            if rows_of != shape:
                raise InputError(f"{OP}: {name} has rows {rows_of}; needs {shape}, as hidden.")
        hidden, teacher_hidden = (t.reshape(-1, t.shape[-1]) for t in (hidden, teacher_hidden))
        target = target.reshape(-1) if isinstance(target, Tensor) else target
    chunk = 0 if chunk_rows is None else as_int(OP, "chunk_rows", chunk_rows)
    if chunk_rows is not None and chunk < 1:
        raise InputError(f"{OP}: chunk_rows is {chunk_rows}; needs 1 or more, or None.")
    args = LinearJsdArgs(
        hidden, weight, teacher_hidden, teacher_weight, target, bias, teacher_bias, beta, temperature, hard_weight,
        ignore_index, reduction, kind, chunk, need_dhidden=False, need_dweight=False, need_dbias=False,
    )  # fmt: skip
    if one_pass.suits(args):
        return one_pass.loss(CONTRACT, args, backend)
    loss: Tensor = call(CONTRACT, args, backend)[0]
    return loss if shape is None or reduction != "none" else loss.view(shape)


def reference(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "batchmean",
    kind: str = "jsd",
    chunk_rows: int | None = None,
) -> Tensor:
    """Plain torch, with all logits at once."""
    student, teacher = (t.reshape(-1, t.shape[-1]) for t in (hidden, teacher_hidden))
    flat = None if target is None else target.reshape(-1)
    args = LinearJsdArgs(
        student, weight, teacher, teacher_weight, flat, bias, teacher_bias, beta, temperature, hard_weight,
        ignore_index, reduction, kind, 0, need_dhidden=False, need_dweight=False, need_dbias=False,
    )  # fmt: skip
    loss = jsd_chunks.reference(args)[0]
    return loss.view(hidden.shape[:-1]) if reduction == "none" else loss


def _outputs(args: LinearJsdArgs) -> tuple[Any, ...]:
    dtype = rows.accumulate_dtype(args.hidden.dtype)
    return (divergence.loss_shape(args.hidden, args.reduction), dtype), ((), dtype), *gradient_outputs(args)


FORWARD = RawOp(
    OP,
    "fwd",
    LinearJsdArgs,
    package="tilewright.ops.loss",
    outputs=_outputs,
    reference=jsd_chunks.reference,
    bucket=linear_bucket,
    bucket_names=LinearBucket._fields,
    count=5,
    compose=jsd_chunks.forward,
)
BACKWARD = RawOp(
    OP,
    "bwd",
    LinearJsdBackwardArgs,
    package="tilewright.ops.loss",
    outputs=gradient_outputs,
    reference=jsd_chunks.reference_backward,
    bucket=linear_bucket,
    bucket_names=LinearBucket._fields,
    count=3,
    compose=jsd_chunks.backward,
)


def check(args: LinearJsdArgs) -> None:
    """Raise InputError for what the docstring of `linear_jsd` excludes."""
    tensors = {name: getattr(args, name) for name in ("hidden", "weight", "teacher_hidden", "teacher_weight")}
    tensors |= {n: t for n, t in (("bias", args.bias), ("teacher_bias", args.teacher_bias)) if t is not None}
    rows.check_floating(OP, **tensors)
    hidden, weight, classes = args.hidden, args.weight, args.weight.shape[0]
    for name, t in tensors.items():
        if t.dtype != hidden.dtype:
            raise InputError(f"{OP}: {name} is {t.dtype}, hidden is {hidden.dtype}; they must have one dtype.")
    if hidden.dim() != 2 or hidden.shape[1] == 0:
        raise InputError(f"{OP}: hidden is {tuple(hidden.shape)}; needs (..., H) with one column or more.")
    teacher = args.teacher_hidden
    if teacher.dim() != 2 or teacher.shape[0] != hidden.shape[0] or teacher.shape[1] == 0:
        raise InputError(f"{OP}: teacher_hidden is {tuple(teacher.shape)}; needs ({hidden.shape[0]}, H_t), as hidden.")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1] or classes == 0:
        raise InputError(f"{OP}: weight is {tuple(weight.shape)}; needs (V, {hidden.shape[1]}), as hidden has columns.")
    if tuple(args.teacher_weight.shape) != (classes, teacher.shape[1]):
        raise InputError(
            f"{OP}: teacher_weight is {tuple(args.teacher_weight.shape)}; needs ({classes}, {teacher.shape[1]}), the "
            "classes of weight and the columns of teacher_hidden."
        )
    for name in ("bias", "teacher_bias"):
        if name in tensors and tuple(tensors[name].shape) != (classes,):
            raise InputError(f"{OP}: {name} is {tuple(tensors[name].shape)}; needs ({classes},), as weight has rows.")
    divergence.check_options(OP, options_of(args))
    divergence.check_targets(OP, args.target, tuple(hidden.shape[:1]), hidden.device)
    if not 0 <= args.hard_weight <= 1:
        raise InputError(f"{OP}: hard_weight is {args.hard_weight}; needs 0 to 1.")
    if args.hard_weight:
        if args.target is None:
            raise InputError(f"{OP}: hard_weight is {args.hard_weight} without target. Pass the classes of the rows.")
        if args.reduction == "mean":
            raise InputError(f'{OP}: hard_weight has no mean over elements. Use reduction="batchmean".')
        entropy.check_range(OP, args.target, classes, args.ignore_index)
    divergence.check_no_gradient(
        OP, teacher_hidden=teacher, teacher_weight=args.teacher_weight, teacher_bias=args.teacher_bias
    )


def _raw_args(grads: Any, saved: Any, args: LinearJsdArgs, needs: Any) -> LinearJsdBackwardArgs:
    hidden, weight, teacher_hidden, teacher_weight, target, bias, teacher_bias, row_count = saved
    return LinearJsdBackwardArgs(
        hidden,
        weight,
        teacher_hidden,
        teacher_weight,
        target,
        bias,
        teacher_bias,
        row_count,
        grads[0],
        beta=args.beta,
        temperature=args.temperature,
        hard_weight=args.hard_weight,
        ignore_index=args.ignore_index,
        reduction=args.reduction,
        kind=args.kind,
        chunk_rows=args.chunk_rows,
        need_dhidden=bool(needs.hidden),
        need_dweight=bool(needs.weight),
        need_dbias=bool(needs.bias),
    )


CONTRACT = register(
    Contract(
        name=OP,
        family="loss",
        summary="last linear layers of a student and its teacher and their divergence, by chunks of rows",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=jsd_samples.inputs,
        cost=jsd_samples.cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("hidden", "weight", "bias"),
            save=lambda args, outputs: (*args[:7], outputs[1]),
            raw_args=_raw_args,
            recomputes=False,
        ),
        workloads=jsd_samples.WORKLOADS,
        cpu_workloads=jsd_samples.CPU_WORKLOADS,
        edge_cases=jsd_samples.EDGE_CASES,
        bad_inputs=jsd_samples.BAD_INPUTS,
        batch_dim=None,
        promises=Promises(batch_invariant=False),
        other_gradients={"weight": 5.0},  # rounded after each chunk
    )
)
