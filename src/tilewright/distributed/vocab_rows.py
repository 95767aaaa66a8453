"""Cross entropy of rows whose classes are divided among ranks, from the ops of one slice.

Each rank computes the logsumexp of its own logits, and has the target's logit if the target is in its slice.  One
all_gather of these few numbers of each row follows, and every rank combines them in the order of the ranks: all have
the same bits.  A softmax over all classes is that of the slice, times the slice's share of the sum of exponentials, so
the gradient of a slice is that of its own logsumexp, times numbers of the row; the target's column is written after it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.dispatch.preference import resolve
from tilewright.dispatch.raw import RawOp
from tilewright.distributed.vocab_slice import IGNORED, Labels, VocabSlice
from tilewright.ops import rows
from tilewright.ops.loss import cross_entropy, entropy
from tilewright.ops.loss.arguments import CrossEntropyArgs
from tilewright.ops.loss.cross_entropy import CrossEntropyBackwardArgs
from tilewright.ops.loss.entropy import Options

Run = Callable[..., None]


class Statistics(NamedTuple):
    """What a gradient needs of rows; (M,) each.   lse: over all classes.   rest: what of it was rounded off."""

    lse: Tensor
    rest: Tensor
    local_lse: Tensor  # of the slice
    local_rest: Tensor


class RowGradients(NamedTuple):
    """The gradients of a batch's loss with respect to the cross entropy and the z-loss of each row, (M,)."""

    cross_entropy: Tensor
    z_loss: Tensor


def runner(backend: str | None) -> Run:
    """(op, out, *args) -> None: run a part on the preferred backend, into `out`."""
    preferred, numerics = resolve(backend)

    def run(op: RawOp, out: Tensor | tuple[Tensor, ...], *args: object) -> None:
        op.write(out, args, preferred.rstrip("!"), numerics)

    return run


def losses(
    run: Run, part: VocabSlice, logits: Tensor, labels: Labels, class_weight: Tensor | None, options: Options
) -> tuple[Tensor, Statistics]:
    """The cross entropy of each row without its z-loss, 0 in ignored rows, and statistics.   A collective call.

    logits: (M, size), those of the slice.   class_weight: (classes,).
    """
    smoothing, weights = options.label_smoothing, part.of(class_weight)
    x = _column(logits, labels.column)
    local, lse, rest = (torch.empty_like(x) for _ in range(3))
    totals = x.new_empty((entropy.TOTALS,))
    alone = Options(IGNORED, 1.0 if smoothing else 0.0, 0.0, options.softcap, "none")
    target = torch.where(labels.is_row, labels.column, IGNORED)
    run(cross_entropy.FORWARD, (local, lse, rest, totals), *CrossEntropyArgs(logits, target, weights, *alone))
    sent = [lse, rest, torch.where(labels.is_own, entropy.capped(x, options.softcap), 0)]
    if smoothing:  # `local` is the mean of w_j (lse - x_j), or NaN for 0 * inf where x_j of its target is -inf
        spread = local * part.size - _sum(weights, part.size, x.dtype) * (lse + rest)
        sent.append(torch.where(x == -torch.inf, torch.inf, spread))
    received = x.new_empty((dist.get_world_size(part.group), len(sent), *x.shape))
    dist.all_gather(list(received.unbind(0)), torch.stack(sent), group=part.group)
    lses, rests, x_targets, *spreads = received.unbind(1)  # (ranks, M)
    row_max = lses.amax(0)
    log_total = (lses - row_max + rests).exp().sum(0).log()
    every = Statistics(row_max + log_total, row_max - (row_max + log_total) + log_total, lse, rest)
    loss = labels.weight * (every.lse - x_targets.sum(0) + every.rest)
    if smoothing:
        smooth = _sum(class_weight, part.classes, x.dtype) * (every.lse + every.rest) + spreads[0].sum(0)
        loss = (1 - smoothing) * loss + smoothing / part.classes * smooth
    loss, lse = (torch.where(labels.is_row, t, 0) for t in (loss, every.lse))
    return loss, every._replace(lse=lse)


def write_gradient(
    run: Run, out: Tensor, part: VocabSlice, logits: Tensor, labels: Labels, class_weight: Tensor | None,
    options: Options, statistics: Statistics, gradients: RowGradients,
) -> None:  # fmt: skip
    """Write the gradient of the slice's logits into `out` (M, size), which may be `logits`.

    p_j * of_p - of_weight * w_j - (j is the target) * of_target, times the derivative of the softcap.
    """
    lse, rest, local_lse, local_rest = statistics
    smoothing, weights = options.label_smoothing, part.of(class_weight)
    of_weight = gradients.cross_entropy * (smoothing / part.classes)
    of_target = gradients.cross_entropy * labels.weight * (1 - smoothing)
    of_p = of_target + of_weight * _sum(class_weight, part.classes, lse.dtype)
    of_p += gradients.z_loss * 2 * options.z_loss * lse
    share = ((local_lse - lse) + (local_rest - rest)).exp()
    x = _column(logits, labels.column)
    totals = x.new_zeros((entropy.TOTALS,))
    totals[2] = _sum(weights, part.size, x.dtype)
    dloss = of_weight * part.size if smoothing else None
    dlse = of_p * share - of_weight * totals[2] if smoothing else of_p * share
    no_share = (local_lse == -torch.inf) & (lse > -torch.inf)
    target = torch.where(labels.is_row & ~no_share, labels.column, IGNORED)
    arguments = CrossEntropyBackwardArgs(
        logits, target, weights, local_lse, local_rest, totals, dloss, dlse,
        IGNORED, 1.0 if smoothing else 0.0, 0.0, options.softcap, "none",
    )  # fmt: skip
    run(cross_entropy.BACKWARD, out, *arguments)
    if out.device.type == "cpu":  # kernels write 0 into rows that are left out, torch NaN where it has -inf alone
        out[target == IGNORED] = 0
    x_target = entropy.capped(x, options.softcap)
    slope = 1 - (x_target / options.softcap).square() if options.softcap else 1.0
    value = (of_p * (x_target - lse - rest).exp() - of_weight * labels.weight - of_target) * slope
    value = torch.where(labels.is_own, value.to(out.dtype), _column(out, labels.column, out.dtype))
    out.scatter_(1, labels.column[:, None], value[:, None])


def of_batch(dloss: Tensor, totals: Tensor, labels: Labels, options: Options) -> RowGradients:
    """The gradients of rows, from that of the loss: () or, for "none", (M,)."""
    dloss = dloss.to(totals.dtype).expand(labels.column.shape)
    if options.reduction == "mean":
        return RowGradients(dloss / totals[0], dloss / totals[1])
    return RowGradients(dloss, dloss)


def totals_of(labels: Labels) -> Tensor:
    """The sums over a batch that its mean needs: weights of its rows, count of its rows."""
    return torch.stack((labels.weight.sum(), labels.is_row.sum().to(labels.weight.dtype)))


def _column(x: Tensor, index: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x[i, index[i]], in the dtype that losses are computed in."""
    return x.gather(1, index[:, None])[:, 0].to(dtype or rows.accumulate_dtype(x.dtype))


def _sum(class_weight: Tensor | None, classes: int, dtype: torch.dtype) -> Tensor | int:
    return classes if class_weight is None else class_weight.detach().sum(dtype=dtype)
