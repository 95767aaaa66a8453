"""Divergences of a student's distributions over classes from a teacher's: options, the reference, checks."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.loss import entropy

REDUCTIONS = ("batchmean", "mean", "sum", "none")
KINDS = ("jsd", "tvd")
STATISTICS = 5
"""Numbers of a row: maximum and log of the sum of exponentials of the student, the same of the teacher, and the sum of
the gradients of the student's log-probabilities.
"""


class Options(NamedTuple):
    """The options, in the order of the raw ops' arguments."""

    beta: float
    temperature: float
    ignore_index: int
    reduction: str
    log_probs: bool
    kind: str


def _log_probs(x: Tensor, options: Options) -> Tensor:
    x = x.to(rows.accumulate_dtype(x.dtype))
    return x if options.log_probs else torch.log_softmax(x / options.temperature, -1)


def _of(weight: Tensor, difference: Tensor) -> Tensor:
    """e^weight * difference of log-probabilities, 0 for a class without probability."""
    return weight.exp() * torch.where(weight == -torch.inf, 0, difference)


def _mixture(q: Tensor, p: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log m - p and log m - q, of the mixture m = beta * e^p + (1 - beta) * e^q."""
    d = torch.where((q == -torch.inf) & (p == -torch.inf), 0, q - p)
    is_teacher = d <= 0  # which of both is the larger part of the mixture
    larger, smaller = (torch.where(is_teacher, a, 1 - a) for a in (beta, 1 - beta))
    log = torch.log(larger + smaller * torch.exp(torch.where(is_teacher, d, -d)))
    return log + torch.where(is_teacher, 0, d), log - torch.where(is_teacher, d, 0)


def _of_rows(q: Tensor, p: Tensor, kind: str, beta: float) -> Tensor:
    """The divergence of each row of log-probabilities: q of the student, p of the teacher."""
    if kind == "tvd":
        return (q.exp() - p.exp()).abs().sum(-1) / 2
    if beta == 0:
        return _of(p, p - q).sum(-1)
    if beta == 1:
        return _of(q, q - p).sum(-1)
    mixture_p, mixture_q = _mixture(q, p, beta)
    return -(beta * _of(p, mixture_p) + (1 - beta) * _of(q, mixture_q)).sum(-1)


def row_losses(student: Tensor, teacher: Tensor, target: Tensor | None, options: Options) -> Tensor:
    """The divergence of each row of (M, V); 0 in ignored rows, which are not read."""
    if target is not None:
        is_row = (target != options.ignore_index)[:, None]
        student, teacher = (torch.where(is_row, t, 0) for t in (student, teacher))
    losses = _of_rows(_log_probs(student, options), _log_probs(teacher, options), options.kind, options.beta)
    return losses if target is None else torch.where(is_row[:, 0], losses, 0)


def statistics_of(student: Tensor, teacher: Tensor, target: Tensor | None, options: Options) -> Tensor:
    """(M, STATISTICS), which a kernel's backward reads; torch or a kernel computed the forward."""
    is_row = None if target is None else (target != options.ignore_index)[:, None]
    logs, columns = [], []
    for t in (student, teacher):
        x = t.to(rows.accumulate_dtype(t.dtype)) / options.temperature
        x = x if is_row is None else torch.where(is_row, x, 0)
        maximum = x.new_zeros(x.shape[0], 1)
        log_sum = maximum
        if not options.log_probs:
            maximum = x.amax(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).min)
            log_sum = (x - maximum).exp().sum(-1, keepdim=True).log()
        logs.append((x - maximum) - log_sum)
        columns += [maximum, log_sum]
    q, p = logs
    if options.kind == "tvd":
        gradient = q.exp() * torch.sign(q.exp() - p.exp()) / 2
    elif options.beta == 0:
        gradient = -p.exp()
    elif options.beta == 1:
        gradient = _of(q, q - p) + (q.exp() if options.log_probs else 0)
    else:
        gradient = (options.beta - 1) * _of(q, _mixture(q, p, options.beta)[1])
    statistics = torch.cat([*columns, gradient.sum(-1, keepdim=True)], 1)
    return statistics if is_row is None else torch.where(is_row, statistics, 0)


def count_of(student: Tensor, target: Tensor | None, options: Options) -> Tensor:
    """The count of the rows that are not ignored, ()."""
    dtype = rows.accumulate_dtype(student.dtype)
    if target is None:
        return student.new_full((), student.shape[0], dtype=dtype)
    return (target != options.ignore_index).sum().to(dtype)


def reduced(losses: Tensor, count: Tensor, classes: int, reduction: str) -> Tensor:
    """The loss of a batch from those of its rows."""
    if reduction == "none":
        return losses
    loss = losses.sum()
    if reduction == "sum":
        return loss
    return loss / count if reduction == "batchmean" else loss / (count * classes)


def forward(student: Tensor, teacher: Tensor, target: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    """(loss, count of rows) of student and teacher (M, V), in plain torch."""
    count = count_of(student, target, options)
    losses = row_losses(student, teacher, target, options)
    return reduced(losses, count, student.shape[-1], options.reduction), count


def loss_shape(student: Tensor, reduction: str) -> tuple[int, ...]:
    """The shape of the loss of raw arguments."""
    return (student.shape[0],) if reduction == "none" else ()


def check_options(op: str, options: Options) -> None:
    """Raise InputError for options outside of the allowed ones."""
    if options.reduction not in REDUCTIONS:
        raise InputError(f"{op}: reduction is {options.reduction!r}; needs one of {', '.join(REDUCTIONS)}.")
    if options.kind not in KINDS:
        raise InputError(f"{op}: kind is {options.kind!r}; needs one of {', '.join(KINDS)}.")
    if options.kind == "tvd" and options.beta != 0.5:
        raise InputError(f"{op}: beta is {options.beta}, which kind='tvd' has not. Leave it out.")
    if not 0 <= options.beta <= 1:
        raise InputError(f"{op}: beta is {options.beta}; needs 0 to 1.")
    if not 0 < options.temperature < float("inf"):
        raise InputError(f"{op}: temperature is {options.temperature}; needs a number above 0.")
    if options.log_probs and options.temperature != 1:
        raise InputError(
            f"{op}: temperature is {options.temperature}, which divides logits; log_probs=True needs 1. "
            "Divide the logits before their log_softmax."
        )


def check_no_gradient(op: str, **tensors: Tensor | None) -> None:
    """Raise InputError for a tensor that requires a gradient, which the op would not give."""
    for name, t in tensors.items():
        if t is not None and torch.is_grad_enabled() and t.requires_grad:
            raise InputError(f"{op}: {name} requires a gradient and has none. Use {name}.detach().")


def check_targets(op: str, target: object, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise InputError unless target is None or class indices of this shape and device."""
    if target is not None:
        entropy.check_targets(op, target, shape, device)
