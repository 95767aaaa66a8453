"""Generalised Jensen-Shannon divergence of a student's distributions from a teacher's, for distillation."""

from typing import Any, NamedTuple

from torch import Tensor

from tilewright.dispatch import Contract, Gradient, Promises, RawOp, call, dispatch, register
from tilewright.dispatch.derivatives import vjp
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.loss import divergence, divergence_samples
from tilewright.ops.loss.divergence import Options

OP = "jsd"
KERNELS = ("triton.jsd",)


class JsdArgs(NamedTuple):
    student: Tensor  # (M, V)
    teacher: Tensor  # (M, V)
    target: Tensor | None  # (M,)
    beta: float
    temperature: float
    ignore_index: int
    reduction: str
    log_probs: bool
    kind: str


class JsdBackwardArgs(NamedTuple):
    student: Tensor  # (M, V)
    teacher: Tensor  # (M, V)
    target: Tensor | None  # (M,)
    statistics: Tensor  # (M, 5)
    row_count: Tensor  # ()
    dloss: Tensor  # () or (M,)
    beta: float
    temperature: float
    ignore_index: int
    reduction: str
    log_probs: bool
    kind: str


def options_of(args: JsdArgs | JsdBackwardArgs) -> Options:
    """What `divergence` takes beside the tensors."""
    return Options(args.beta, args.temperature, args.ignore_index, args.reduction, args.log_probs, args.kind)


@dispatch(OP)
def jsd(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "batchmean",
    log_probs: bool = False,
    kind: str = "jsd",
    backend: str | None = None,
) -> Tensor:
    """beta * KL(p || m) + (1 - beta) * KL(q || m), m = beta * p + (1 - beta) * q, with q = softmax(student /
    temperature) and p = softmax(teacher / temperature); computed in float32.

    beta = 0 is the forward divergence KL(p || q), the usual loss of distillation, and 1 the reverse one, KL(q || p).
    kind: "jsd", or "tvd", the total variation distance sum(abs(p - q)) / 2, which has no beta.
    student, teacher: (..., V) bf16|fp16|fp32, one shape and dtype; rows without one stride, or without a unit stride in
    a row, cost a copy.
    target: (...) int64|int32, of which only `ignore_index` is read: such a row has loss 0 and gradient 0.   None: all
    rows count.
    temperature: above 0; the loss is not multiplied by its square.
    reduction: "batchmean" (over rows that are not ignored), "mean" (that divided by V, the mean over elements), "sum",
    "none" (a loss for each row).   The means are NaN where there are no rows.
    log_probs: student and teacher are log q and log p, of which a gradient is then that of torch's kl_div: not along
    their normalisation.
    Returns float32: (), or (...) for "none".
    A class of probability 0 (-inf) adds nothing of its side; where the other divides by it, the divergence is inf.
    Gradient of student.   teacher has none, and is refused with requires_grad.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for other dtypes, shapes and options.
    Source: Agarwal et al., "On-Policy Distillation of Language Models", 2024.
    """
    shape: tuple[int, ...] | None = None
    if isinstance(student, Tensor) and isinstance(teacher, Tensor) and student.dim() not in (0, 2):
        rows.check_same(OP, student=student, teacher=teacher)
        shape = tuple(student.shape[:-1])
        if isinstance(target, Tensor):
            if tuple(target.shape) != shape:
                raise InputError(f"{OP}: target is {tuple(target.shape)}; needs {shape}, as student.")
            target = target.reshape(-1)
        student, teacher = (t.flatten(0, -2) if t.dim() > 1 else t[None] for t in (student, teacher))
    args = JsdArgs(student, teacher, target, beta, temperature, ignore_index, reduction, log_probs, kind)
    loss: Tensor = call(CONTRACT, args, backend)[0]
    return loss if shape is None or reduction != "none" else loss.view(shape)


def reference(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "batchmean",
    log_probs: bool = False,
    kind: str = "jsd",
) -> Tensor:
    """Plain torch, in float32."""
    options = Options(beta, temperature, ignore_index, reduction, log_probs, kind)
    classes = student.shape[-1]
    flat = None if target is None else target.reshape(-1)
    loss, _ = divergence.forward(student.reshape(-1, classes), teacher.reshape(-1, classes), flat, options)
    return loss.view(student.shape[:-1]) if reduction == "none" else loss


def _forward(args: JsdArgs) -> tuple[Tensor, Tensor, Tensor]:
    options = options_of(args)
    loss, count = divergence.forward(args.student, args.teacher, args.target, options)
    return loss, divergence.statistics_of(args.student, args.teacher, args.target, options), count


def _backward(args: JsdBackwardArgs) -> Tensor:
    options = options_of(args)

    def function(student: Tensor) -> Tensor:
        losses = divergence.row_losses(student, args.teacher, args.target, options)
        return divergence.reduced(losses, args.row_count.detach(), student.shape[-1], options.reduction)

    return vjp(function, (args.student,), (args.dloss,))[0]


def _outputs(args: JsdArgs) -> tuple[Any, ...]:
    dtype = rows.accumulate_dtype(args.student.dtype)
    statistics = (args.student.shape[0], divergence.STATISTICS)
    return (divergence.loss_shape(args.student, args.reduction), dtype), (statistics, dtype), ((), dtype)


FORWARD = RawOp(
    OP,
    "fwd",
    JsdArgs,
    package="tilewright.ops.loss",
    kernels=KERNELS,
    outputs=_outputs,
    reference=_forward,
    bucket=lambda args: rows.rows_bucket(args.student),
    bucket_names=rows.RowsBucket._fields,
    count=3,
)
BACKWARD = RawOp(
    OP,
    "bwd",
    JsdBackwardArgs,
    package="tilewright.ops.loss",
    kernels=KERNELS,
    outputs=lambda args: ((args.student.shape, args.student.dtype),),
    reference=_backward,
    bucket=lambda args: rows.rows_bucket(args.student),
    bucket_names=rows.RowsBucket._fields,
)


def check(args: JsdArgs) -> None:
    """Raise InputError for what the docstring of `jsd` excludes."""
    student, teacher = args.student, args.teacher
    rows.check_floating(OP, student=student, teacher=teacher)
    rows.check_same(OP, student=student, teacher=teacher)
    if student.dim() != 2 or student.shape[1] == 0:
        raise InputError(f"{OP}: student is {tuple(student.shape)}; needs (..., V) with one class or more.")
    divergence.check_options(OP, options_of(args))
    divergence.check_targets(OP, args.target, tuple(student.shape[:1]), student.device)
    divergence.check_no_gradient(OP, teacher=teacher)


def _raw_args(grads: Any, saved: Any, args: JsdArgs, needs: Any) -> JsdBackwardArgs:
    dloss, *_ = grads  # the others are no functions of the student
    student, teacher, target, statistics, row_count = saved
    options = options_of(args)._asdict()
    return JsdBackwardArgs(student, teacher, target, statistics, row_count, dloss, **options)


CONTRACT = register(
    Contract(
        name=OP,
        family="loss",
        summary="generalised Jensen-Shannon divergence of logits or log-probabilities, for distillation",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=divergence_samples.inputs,
        cost=divergence_samples.cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("student",),
            save=lambda args, outputs: (args.student, args.teacher, args.target, *outputs[1:]),
            raw_args=_raw_args,
        ),
        workloads=divergence_samples.WORKLOADS,
        cpu_workloads=divergence_samples.CPU_WORKLOADS,
        edge_cases=divergence_samples.EDGE_CASES,
        bad_inputs=divergence_samples.BAD_INPUTS,
        batch_dim=None,
        promises=Promises(batch_invariant=False),
    )
)
