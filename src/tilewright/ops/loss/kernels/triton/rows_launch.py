"""What the launches of cross entropy share: the configuration of a row's loop, the batch's sums, constants."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.loss.entropy import Options
from tilewright.ops.loss.in_place import InPlaceBucket
from tilewright.ops.loss.kernels.triton.cross_entropy_kernel import batch_kernel
from tilewright.ops.rows import RowsBucket

_batch = TritonKernel(batch_kernel)
_BLOCK, _WARPS = 4096, 8


class RowConfig(NamedTuple):
    steps: int  # 16-byte vectors of a thread in one step of the loop over a row
    num_warps: int
    num_stages: int = 1


def row_config(bucket: RowsBucket | InPlaceBucket, dtype: torch.dtype, steps: int, num_warps: int) -> RowConfig:
    """Gives a row as many warps as it has work for, up to `num_warps`."""
    vectors = triton.next_power_of_2(-(-bucket.N * dtype.itemsize // 16))
    warps = min(num_warps, max(1, vectors // 32))
    return RowConfig(min(steps, max(1, vectors // (32 * warps))), warps)


def row_candidates(bucket: RowsBucket | InPlaceBucket, dtype: torch.dtype) -> tuple[RowConfig, ...]:
    """Steps, warps and stages that a row has work for; a warp alone loads one step at a time."""
    vectors = triton.next_power_of_2(-(-bucket.N * dtype.itemsize // 16))
    return tuple(
        RowConfig(steps, warps, stages)
        for warps in (1, 2, 4, 8, 16, 32)
        for steps in (1, 2, 4, 8)
        for stages in (1, 2, 3)
        if 32 * warps * steps <= max(vectors, 32) and (stages == 1 or (warps > 1 and 32 * warps * steps * 4 <= vectors))
    )


def lanes(num_warps: int, dtype: torch.dtype) -> int:
    """Columns of one vector for each thread."""
    return num_warps * 32 * 16 // dtype.itemsize


def is_aligned(*rows: Tensor) -> bool:
    """Does the compiler see whole vectors: rows of a multiple of 16 elements, a multiple of 16 apart?"""
    return all(t.shape[1] % 16 == 0 and (t.stride(0) % 16 == 0 or t.shape[0] == 1) for t in rows)


def flags(options: Options, weight: Tensor | None) -> tuple[bool, bool, bool]:
    """SOFTCAP, SMOOTH and WEIGHTED."""
    return options.softcap != 0, options.label_smoothing != 0, weight is not None


def count_rows(totals: Tensor, target: Tensor, weight: Tensor | None, classes: int, options: Options) -> None:
    """Write the totals of a batch."""
    _launch(totals, totals, totals, totals, target, weight, classes, options, count=True, reduce=False)


def reduce_rows(
    loss: Tensor, totals: Tensor, rows: Tensor, lse: Tensor, target: Tensor, weight: Tensor | None, classes: int,
    options: Options, *, count: bool,
) -> None:  # fmt: skip
    """Write the loss of a batch from those of its rows; count: the totals too, else a mean reads them."""
    _launch(loss, totals, rows, lse, target, weight, classes, options, count=count, reduce=True)


def _launch(
    loss: Tensor, totals: Tensor, rows: Tensor, lse: Tensor, target: Tensor, weight: Tensor | None, classes: int,
    options: Options, *, count: bool, reduce: bool,
) -> None:  # fmt: skip
    weights = totals if weight is None else weight
    parameters = (
        loss, totals, rows, lse, target, weights, target.shape[0], classes, options.ignore_index, options.z_loss
    )  # fmt: skip
    _, smooth, weighted = flags(options, weight)
    mean = options.reduction == "mean"
    constants = (_BLOCK, weighted, count, reduce, mean, smooth, options.z_loss != 0)
    _batch((1,), parameters, constants, num_warps=_WARPS)
