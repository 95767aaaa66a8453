"""The loss of a batch from those of its rows, in Triton: one program adds them up in a fixed order."""

import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.triton_launch import TritonKernel

_BLOCK, _WARPS = 4096, 8


@triton.jit
def _sum_rows_kernel(
    loss, count, losses, target, M, ignore_index, divisor,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, HAS_TARGET: tl.constexpr, REDUCE: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """COUNT: the count of rows that are not ignored.   REDUCE: the sum of the losses / divisor; MEAN: / count, too."""
    offs = tl.arange(0, BLOCK)
    count_i = tl.zeros((BLOCK,), tl.int32)
    loss_i = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, M, BLOCK):
        mask = offs < M - first
        if HAS_TARGET:
            t = tl.load(target + first + offs, mask=mask, other=0).to(tl.int64)
            count_i += (mask & (t != ignore_index)).to(tl.int32)
        if REDUCE:
            loss_i += tl.load(losses + first + offs, mask=mask, other=0.0)
    total = M * 1.0
    if HAS_TARGET:
        total = tl.sum(count_i, 0).to(tl.float32)
    if COUNT:
        tl.store(count, total)
    if REDUCE:
        if MEAN:
            divisor *= total
        tl.store(loss, tl.div_rn(tl.sum(loss_i, 0), divisor))


_sum = TritonKernel(_sum_rows_kernel)


def sum_rows(
    loss: Tensor, count: Tensor, losses: Tensor, target: Tensor | None, classes: int, ignore_index: int, reduction: str
) -> None:
    """Write the count of rows and, for reductions other than "none", their loss."""
    divisor = float(classes) if reduction == "mean" else 1.0
    parameters = (loss, count, losses, count if target is None else target, losses.shape[0], ignore_index, divisor)
    constants = (_BLOCK, True, target is not None, reduction != "none", reduction in ("mean", "batchmean"))
    _sum((1,), parameters, constants, num_warps=_WARPS)


def sum_parts(loss: Tensor, parts: Tensor, divisor: int) -> None:
    """Write the sum of all parts, divided."""
    parameters = (loss, loss, parts, loss, parts.shape[0], 0, float(divisor))
    _sum((1,), parameters, (_BLOCK, False, False, True, False), num_warps=_WARPS)
