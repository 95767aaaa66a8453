"""RMSNorm in Triton, rows too long for registers.  A program reads one row twice in blocks: once for rstd, once for y.

Serves rms_norm and add_rms_norm; `rms_norm_fp8.py` shares `rstd_of_row` and `normalise_block`.  The second read comes
from L2.  In the backward the first read also sums wdy * x, and the weight gradient is one more kernel over blocks of
columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.norm.add_rms_norm import AddRmsNormArgs, AddRmsNormBackwardArgs
from tilewright.ops.norm.kernels.triton.affine import load_weight
from tilewright.ops.norm.kernels.triton.column_sums import mean_of
from tilewright.ops.norm.rms_norm import RmsNormArgs, RmsNormBackwardArgs


@triton.jit
def _load_fp32(x, residual, row_idx, col_offsets, N, stride_x, stride_r, ADD: tl.constexpr):
    """A block of x, or of x + residual rounded to x's dtype, in float32; 0 beyond N."""
    mask = col_offsets < N
    x_fp32 = tl.load(x + row_idx * stride_x + col_offsets, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x_fp32 += tl.load(residual + row_idx * stride_r + col_offsets, mask=mask, other=0.0).to(tl.float32)
        x_fp32 = x_fp32.to(x.dtype.element_ty).to(tl.float32)
    return x_fp32


@triton.jit
def rstd_of_row(x, residual, row_idx, N, stride_x, stride_r, eps, ADD: tl.constexpr, BLOCK_N: tl.constexpr):
    """rstd of one long row."""
    sum_squares = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        x_fp32 = _load_fp32(x, residual, row_idx, start + tl.arange(0, BLOCK_N), N, stride_x, stride_r, ADD)
        sum_squares += x_fp32 * x_fp32
    return tl.rsqrt(mean_of(tl.sum(sum_squares, 0), N) + eps)


@triton.jit
def normalise_block(
    total, x, residual, weight, row_idx, rstd, col_offsets, N, stride_x, stride_r, offset,
    ADD: tl.constexpr, FP32_WEIGHT: tl.constexpr,
):  # fmt: skip
    """y of the columns `col_offsets` of a long row in float32, before it is rounded to y's dtype."""
    mask = col_offsets < N
    x_fp32 = _load_fp32(x, residual, row_idx, col_offsets, N, stride_x, stride_r, ADD)
    if ADD:
        tl.store(total + row_idx * N + col_offsets, x_fp32.to(total.dtype.element_ty), mask=mask)
    w = load_weight(weight, col_offsets, mask)
    if FP32_WEIGHT:
        y_fp32 = x_fp32 * rstd * (offset + w)
    else:
        y_fp32 = (x_fp32 * rstd).to(x.dtype.element_ty).to(tl.float32) * w
    return y_fp32


@triton.jit
def _rms_norm_long_kernel(
    y, total, x, residual, weight, N, stride_x, stride_r, eps, offset,  # y, total, x, residual: (M, N)   weight: (N,)
    ADD: tl.constexpr, FP32_WEIGHT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = x_hat * (offset + weight), one row a program."""
    # First read: rstd
    row_idx = tl.program_id(0).to(tl.int64)
    rstd = rstd_of_row(x, residual, row_idx, N, stride_x, stride_r, eps, ADD, BLOCK_N)
    # Second read: y
    for start in range(0, N, BLOCK_N):
        col_offsets = start + tl.arange(0, BLOCK_N)
        y_fp32 = normalise_block(
            total, x, residual, weight, row_idx, rstd, col_offsets, N, stride_x, stride_r, offset, ADD, FP32_WEIGHT
        )
        tl.store(y + row_idx * N + col_offsets, y_fp32.to(y.dtype.element_ty), mask=col_offsets < N)


@triton.jit
def _rms_norm_backward_long_kernel(
    dx, rstds, dy, x, weight, dtotal, N, stride_dy, stride_x, stride_dt, eps, offset,  # rstds: (M,)
    ADD: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dx = rstd * (wdy - x_hat * (1 / N) * dot(wdy, x_hat))   [+ dtotal if ADD], one row a program; writes rstd too."""
    # First read: rstd and dot(wdy, x_hat)
    row_idx = tl.program_id(0).to(tl.int64)
    sum_squares = tl.zeros((BLOCK_N,), tl.float32)
    sum_wdy_x = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        col_offsets = start + tl.arange(0, BLOCK_N)
        mask = col_offsets < N
        x_fp32 = tl.load(x + row_idx * stride_x + col_offsets, mask=mask, other=0.0).to(tl.float32)
        w = load_weight(weight, col_offsets, mask) + offset
        wdy = tl.load(dy + row_idx * stride_dy + col_offsets, mask=mask, other=0.0).to(tl.float32) * w
        sum_squares += x_fp32 * x_fp32
        sum_wdy_x += wdy * x_fp32
    rstd = tl.rsqrt(mean_of(tl.sum(sum_squares, 0), N) + eps)
    mean_wdy_x_hat = mean_of(tl.sum(sum_wdy_x, 0) * rstd, N)
    tl.store(rstds + row_idx, rstd)
    # Second read: dx
    for start in range(0, N, BLOCK_N):
        col_offsets = start + tl.arange(0, BLOCK_N)
        mask = col_offsets < N
        x_hat = tl.load(x + row_idx * stride_x + col_offsets, mask=mask, other=0.0).to(tl.float32) * rstd
        w = load_weight(weight, col_offsets, mask) + offset
        wdy = tl.load(dy + row_idx * stride_dy + col_offsets, mask=mask, other=0.0).to(tl.float32) * w
        dx_fp32 = (wdy - x_hat * mean_wdy_x_hat) * rstd
        if ADD:
            dx_fp32 += tl.load(dtotal + row_idx * stride_dt + col_offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + row_idx * N + col_offsets, dx_fp32.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_dweight_long_kernel(
    dweight, dy, x, rstds, M, N, stride_dy, stride_x,  # dweight: (N,)   rstds: (M,)
    FP32_WEIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dw = sum(dy * x_hat) over the rows, x_hat rounded to x's dtype unless FP32_WEIGHT.  BLOCK_N columns a program."""
    col_offsets = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = col_offsets < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, M, BLOCK_M):
        row_idx = start + tl.arange(0, BLOCK_M)
        row_offsets = row_idx.to(tl.int64)[:, None]
        mask = (row_idx[:, None] < M) & col_mask[None, :]
        rstd = tl.load(rstds + row_idx, mask=row_idx < M, other=0.0)[:, None]
        x_hat = tl.load(x + row_offsets * stride_x + col_offsets[None, :], mask=mask, other=0.0).to(tl.float32) * rstd
        if not FP32_WEIGHT:
            x_hat = x_hat.to(x.dtype.element_ty).to(tl.float32)
        dy_fp32 = tl.load(dy + row_offsets * stride_dy + col_offsets[None, :], mask=mask, other=0.0).to(tl.float32)
        acc += dy_fp32 * x_hat
    tl.store(dweight + col_offsets, tl.sum(acc, 0).to(dweight.dtype.element_ty), mask=col_mask)


_forward = TritonKernel(_rms_norm_long_kernel)
_backward = TritonKernel(_rms_norm_backward_long_kernel)
_dweight = TritonKernel(_rms_norm_dweight_long_kernel)


def launch(
    y: Tensor, total: Tensor | None, x: Tensor, residual: Tensor | None, args: RmsNormArgs | AddRmsNormArgs
) -> None:
    """The forward.   x, residual: (M, N), rows of the tensors in `args`, whose weight is contiguous or None."""
    m, n = x.shape
    add = residual is not None
    strides = (x.stride(0), residual.stride(0) if add else 0)
    parameters = (y, total, x, residual, args.weight, n, *strides, args.eps, args.offset)
    _forward((m,), parameters, (add, args.fp32_weight, 4096), num_warps=8)


def launch_backward(
    dx: Tensor,
    dweight: Tensor,
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    args: RmsNormBackwardArgs | AddRmsNormBackwardArgs,
) -> None:
    """The backward.   dy, dtotal, x: (M, N), rows of the tensors in `args`, whose weight is contiguous or None."""
    m, n = x.shape
    add = dtotal is not None
    rstds = scratch((m,), torch.float32, x.device)
    strides = (dy.stride(0), x.stride(0), dtotal.stride(0) if add else 0)
    parameters = (dx, rstds, dy, x, args.weight, dtotal, n, *strides, args.eps, args.offset)
    _backward((m,), parameters, (add, 4096), num_warps=8)
    if args.need_dweight:
        parameters = (dweight, dy, x, rstds, m, n, *strides[:2])
        _dweight((triton.cdiv(n, 64),), parameters, (args.fp32_weight, 64, 64), num_warps=8)
