"""What the forms of cross entropy share: options, the reference, the gradient, checks."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from tilewright.dispatch.arguments import as_float
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.settings import current

REDUCTIONS = ("mean", "sum", "none")
INDICES = (torch.int64, torch.int32)
TOTALS = 3
"""Sums over a batch: the weights of its rows, the count of its rows, the weights of all classes."""


class Options(NamedTuple):
    """The options of every form, in the order of the raw ops' arguments."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float  # 0: none
    reduction: str


def capped(x: Tensor, softcap: float) -> Tensor:
    """Logits as the loss sees them."""
    return softcap * torch.tanh(x / softcap) if softcap else x


def row_losses(x: Tensor, target: Tensor, weight: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    """(cross entropy, logsumexp) of each row of x (M, V), without `z_loss`; both are 0 in ignored rows."""
    x = capped(x.to(rows.accumulate_dtype(x.dtype)), options.softcap)
    target = target.to(torch.int64)
    loss = F.cross_entropy(
        x,
        target,
        None if weight is None else weight.detach().to(x.dtype),
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
        reduction="none",
    )
    return loss, torch.where(target == options.ignore_index, 0, torch.logsumexp(x, -1))


def totals_of(x: Tensor, target: Tensor, weight: Tensor | None, options: Options) -> Tensor:
    """The sums over a batch that its mean, and the gradient, need; see `TOTALS`."""
    dtype, classes = rows.accumulate_dtype(x.dtype), x.shape[-1]
    is_row = target != options.ignore_index
    count = is_row.sum().to(dtype)
    if weight is None:
        return torch.stack((count, count, torch.full_like(count, classes)))
    weight = weight.detach().to(dtype)
    of_rows = torch.where(is_row, weight[torch.where(is_row, target, 0).to(torch.int64)], 0)
    return torch.stack((of_rows.sum(), count, weight.sum()))


def reduced(loss: Tensor, lse: Tensor, totals: Tensor, options: Options) -> Tensor:
    """The loss of a batch from those of its rows; the mean of the z-loss is over rows, whatever their weights."""
    z = options.z_loss * lse.square() if options.z_loss else None
    if options.reduction == "none":
        return loss if z is None else loss + z
    loss, z = loss.sum(), None if z is None else z.sum()
    if options.reduction == "mean":
        loss, z = loss / totals[0], None if z is None else z / totals[1]
    return loss if z is None else loss + z


def forward(x: Tensor, target: Tensor, weight: Tensor | None, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, logsumexp of each row, totals) of x (M, V), in plain torch."""
    loss, lse = row_losses(x, target, weight, options)
    totals = totals_of(x, target, weight, options)
    return reduced(loss, lse, totals, options), lse, totals


def loss_shape(target: Tensor, reduction: str) -> tuple[int, ...]:
    """The shape of the loss of raw arguments."""
    return tuple(target.shape) if reduction == "none" else ()


def as_softcap(op: str, softcap: float | None) -> float:
    """The softcap of the raw ops: 0 for none."""
    if softcap is None:
        return 0.0
    number: float = as_float(op, "softcap", softcap)
    if not number > 0:
        raise InputError(f"{op}: softcap is {softcap}; needs a number above 0, or None.")
    return number


def check_options(op: str, options: Options) -> None:
    """Raise InputError for options outside of the allowed ones."""
    if options.reduction not in REDUCTIONS:
        raise InputError(f"{op}: reduction is {options.reduction!r}; needs one of {', '.join(REDUCTIONS)}.")
    if not 0 <= options.label_smoothing <= 1:
        raise InputError(f"{op}: label_smoothing is {options.label_smoothing}; needs 0 to 1.")
    if not options.z_loss >= 0:
        raise InputError(f"{op}: z_loss is {options.z_loss}; needs 0 or more.")
    if not 0 <= options.softcap < float("inf"):
        raise InputError(f"{op}: softcap is {options.softcap}; needs a number above 0, or None.")


def check_targets(op: str, target: object, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise InputError unless target is int32 or int64 of this shape; on a GPU numbers are looked at when asked."""
    if not isinstance(target, Tensor):
        raise InputError(f"{op}: target is a {type(target).__name__}; needs a tensor of class indices.")
    if target.dtype not in INDICES:
        raise InputError(f"{op}: target is {target.dtype}; needs int64 or int32, the index of a class in each row.")
    if tuple(target.shape) != shape:
        raise InputError(f"{op}: target is {tuple(target.shape)}; needs {shape}, an index for each row.")
    if target.device != device:
        raise InputError(f"{op}: target is on {target.device}, the first tensor on {device}. Move them to one device.")


def check_range(op: str, target: Tensor, classes: int, ignore_index: int) -> None:
    """Raise InputError for an index that is no class, where numbers may be read: on a CPU, and under
    TILEWRIGHT_CHECK=1.
    """
    if not _may_read(target) or not target.numel():
        return
    bad = (target != ignore_index) & ((target < 0) | (target >= classes))
    if bad.any():
        raise InputError(f"{op}: target has {int(target[bad][0])}; needs 0 to {classes - 1}, or {ignore_index}.")


def check_weight(op: str, weight: Tensor | None, classes: int, device: torch.device) -> None:
    """Raise InputError unless weight is None or (V,) floating, without gradient."""
    if weight is None:
        return
    if not isinstance(weight, Tensor):
        raise InputError(f"{op}: weight is a {type(weight).__name__}; needs a tensor ({classes},), or None.")
    if weight.dtype not in rows.FLOATS or tuple(weight.shape) != (classes,):
        raise InputError(f"{op}: weight is {tuple(weight.shape)} {weight.dtype}; needs floating ({classes},).")
    if weight.device != device:
        raise InputError(f"{op}: weight is on {weight.device}, the first tensor on {device}. Move them to one device.")
    if torch.is_grad_enabled() and weight.requires_grad:
        raise InputError(f"{op}: weight, of the classes, requires a gradient and has none. Use weight.detach().")


def check_numbers(
    op: str, name: str, t: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise InputError unless t is None or a tensor of this shape, dtype and device."""
    if t is None:
        return
    if not isinstance(t, Tensor):
        raise InputError(f"{op}: {name} is a {type(t).__name__}; needs a tensor {shape} of {dtype}, or None.")
    if tuple(t.shape) != shape or t.dtype != dtype:
        raise InputError(f"{op}: {name} is {tuple(t.shape)} {t.dtype}; needs {shape} {dtype}.")
    if t.device != device:
        raise InputError(f"{op}: {name} is on {t.device}, the first tensor on {device}. Move them to one device.")


def _may_read(t: Tensor) -> bool:
    if type(t) not in (Tensor, Parameter) or t.is_meta or torch.compiler.is_compiling():
        return False
    return t.device.type == "cpu" or (current().check and not torch.cuda.is_current_stream_capturing())
