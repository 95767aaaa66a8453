"""Sums that the norms share: the mean of a row, and the second step of a weight gradient.

A backward kernel leaves `partial` (P, N) float32, one row a program; `column_sums` adds the rows.  It reads 4*P*N
bytes; P is the SM count, so this is under 2 % of the backward at 8192x4096.  Fixed tiles and a fixed order make the
result bitwise repeatable, which atomics would not be.
"""

import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.triton_launch import TritonKernel

BLOCK_P, BLOCK_N = 64, 32  # 128 programs at N=4096: one wave of an H200, each reading 128-byte row segments


@triton.jit
def mean_of(row_sum, N):
    """row_sum / N, correctly rounded: Triton's own division is off by 2 ULP, and a later difference magnifies that."""
    return tl.div_rn(row_sum, N + 0.0)


@triton.jit
def _sum_columns(total, partial, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    acc = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, P, BLOCK_P):
        offs_p = (start + tl.arange(0, BLOCK_P)).to(tl.int64)
        mask = (offs_p[:, None] < P) & mask_n[None, :]
        acc += tl.load(partial + offs_p[:, None] * N + offs_n[None, :], mask=mask, other=0.0)
    tl.store(total + offs_n, tl.sum(acc, 0).to(total.dtype.element_ty), mask=mask_n)


@triton.jit
def _column_sums_kernel(
    total, partial, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):  # total: (N,)  partial: (P, N)
    _sum_columns(total, partial, P, N, BLOCK_P, BLOCK_N)


@triton.jit
def _two_column_sums_kernel(
    first, second, partial, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):  # first, second: (N,)  partial: (2, P, N)
    if tl.program_id(1) == 0:
        _sum_columns(first, partial, P, N, BLOCK_P, BLOCK_N)
    else:
        _sum_columns(second, partial + tl.cast(P, tl.int64) * N, P, N, BLOCK_P, BLOCK_N)


_kernel = TritonKernel(_column_sums_kernel)
_two = TritonKernel(_two_column_sums_kernel)


def column_sums(total: Tensor, partial: Tensor) -> None:
    """total (N,) = sum over the rows of partial (P, N) float32, rounded once to total's dtype."""
    p, n = partial.shape
    _kernel((triton.cdiv(n, BLOCK_N),), (total, partial, p, n), (BLOCK_P, BLOCK_N), num_warps=4)


def affine_sums(dweight: Tensor, dbias: Tensor, partials: Tensor) -> None:
    """`column_sums` of partials (2, P, N) into both gradients (N,), of which an empty one is not needed."""
    if dweight.numel() and dbias.numel():
        _, p, n = partials.shape
        grid = (triton.cdiv(n, BLOCK_N), 2)
        _two(grid, (dweight, dbias, partials, p, n), (BLOCK_P, BLOCK_N), num_warps=4)
        return
    for total, partial in zip((dweight, dbias), partials, strict=True):
        if total.numel():
            column_sums(total, partial)
