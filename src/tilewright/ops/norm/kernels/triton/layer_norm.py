"""LayerNorm in Triton.  A program holds whole rows in registers, so mean and variance are two passes over one read.

The second pass corrects the mean (`moments.py`), so a row of equal values gives zeros, and the mean may be a product
with 1 / N: a division for each row would need registers that the backward does not have.

Traffic: forward 4*M*N bytes at bf16, backward 6*M*N; the same floors as RMSNorm.  The backward recomputes mean and
rstd from the row it reads, and sums the gradients of weight and bias in a fixed order (`affine_sums`).
Rows too long for registers are read in blocks, three times: mean, variance about it, output; re-reads come from L2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.norm.kernels.triton import row_blocks
from tilewright.ops.norm.kernels.triton.affine import load_bias, load_weight
from tilewright.ops.norm.kernels.triton.column_sums import affine_sums
from tilewright.ops.norm.kernels.triton.moments import sum_pair, variance_of
from tilewright.ops.norm.kernels.triton.row_blocks import MAX_BLOCK, Config, PersistentConfig
from tilewright.ops.norm.layer_norm import BACKWARD, FORWARD, LayerNormArgs, LayerNormBackwardArgs
from tilewright.ops.rows import RowsBucket, as_rows, contiguous


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    block = min(triton.next_power_of_2(bucket.N), MAX_BLOCK)
    if block <= 512:
        return Config(rows=max(1, min(8, 2048 // block)), num_warps=4)
    # Two rows hide each other's two reductions: 35.4 us against 36.4 with one at 8192x4096, 16.8 against 18.0 at
    # 8192x1600 (H200, 2026-11).  With few rows latency decides: one row a program, and more warps; 2048x1024 takes 5.07
    # us with one and 5.42 with two (H100).
    rows = 2 if bucket.M >= 4096 and block <= 8192 else 1
    return Config(rows, num_warps=min(16, max(4, rows * block // (1024 if rows == 2 else 512))))


@triton.jit
def _centred(x_fp32, mask, inv_n):
    """x - mean (ROWS, BLOCK_N) and the variance (ROWS,).   inv_n: 1 / N."""
    centred = tl.where(mask, x_fp32 - (tl.sum(x_fp32, 1) * inv_n)[:, None], 0.0)
    deviation, square = sum_pair(centred, centred * centred, 1)
    shift, variance = variance_of(deviation, square, inv_n)
    return tl.where(mask, centred - shift[:, None], 0.0), variance


@triton.jit
def _layer_norm_kernel(
    y, x, weight, bias, M, N, stride_x, eps,  # x, y: (M, N)   weight, bias: (N,) or None
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = x_hat * weight + bias, x_hat = (x - mean) * rstd, rstd = 1 / sqrt(variance + eps)."""
    # Load weight and bias
    col_offsets = tl.arange(0, BLOCK_N)
    col_mask = col_offsets < N
    w, b = load_weight(weight, col_offsets, col_mask), load_bias(bias, col_offsets, col_mask)
    # Load the rows
    row_idx = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_offsets = row_idx.to(tl.int64)[:, None]
    mask = (row_idx[:, None] < M) & col_mask[None, :]
    x_fp32 = tl.load(x + row_offsets * stride_x + col_offsets[None, :], mask=mask, other=0.0).to(tl.float32)
    # Normalise, scale and shift
    centred, variance = _centred(x_fp32, mask, tl.div_rn(1.0, N + 0.0))
    y_fp32 = centred * tl.rsqrt(variance + eps)[:, None] * w[None, :] + b[None, :]
    tl.store(y + row_offsets * N + col_offsets[None, :], y_fp32.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _row_statistics(x, row_idx, N, stride_x, eps, BLOCK_N: tl.constexpr):
    """(mean, rstd) of one long row, the variance computed about the mean."""
    # First read: the mean
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        col_offsets = start + tl.arange(0, BLOCK_N)
        total += tl.load(x + row_idx * stride_x + col_offsets, mask=col_offsets < N, other=0.0).to(tl.float32)
    inv_n = tl.div_rn(1.0, N + 0.0)
    mean = tl.sum(total, 0) * inv_n
    # Second read: deviations from the mean, and their squares
    deviations = tl.zeros((BLOCK_N,), tl.float32)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        col_offsets = start + tl.arange(0, BLOCK_N)
        x_fp32 = tl.load(x + row_idx * stride_x + col_offsets, mask=col_offsets < N, other=0.0).to(tl.float32)
        centred = tl.where(col_offsets < N, x_fp32 - mean, 0.0)
        deviations += centred
        squares += centred * centred
    deviation, square = sum_pair(deviations, squares, 0)
    shift, variance = variance_of(deviation, square, inv_n)
    return mean + shift, tl.rsqrt(variance + eps)


@triton.jit
def _layer_norm_long_kernel(y, x, weight, bias, N, stride_x, eps, BLOCK_N: tl.constexpr):
    """y as above, one row a program."""
    row_idx = tl.program_id(0).to(tl.int64)
    mean, rstd = _row_statistics(x, row_idx, N, stride_x, eps, BLOCK_N)
    for start in range(0, N, BLOCK_N):
        col_offsets = start + tl.arange(0, BLOCK_N)
        mask = col_offsets < N
        w, b = load_weight(weight, col_offsets, mask), load_bias(bias, col_offsets, mask)
        x_fp32 = tl.load(x + row_idx * stride_x + col_offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + row_idx * N + col_offsets, ((x_fp32 - mean) * rstd * w + b).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _layer_norm_backward_kernel(
    dx, dw_partial, db_partial, dy, x, weight, M, N, stride_dy, stride_x, eps,  # partial_*: (programs, N)
    AFFINE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """With wdy = weight * dy (elementwise), for each row:

        dx = rstd * (wdy - (1 / N) * sum(wdy) - x_hat * (1 / N) * dot(wdy, x_hat))

    and, summed over the rows, dw = sum(dy * x_hat) and db = sum(dy).
    """
    # Load the weight
    col_offsets = tl.arange(0, BLOCK_N)
    col_mask = col_offsets < N
    w = load_weight(weight, col_offsets, col_mask)
    dw = tl.zeros((BLOCK_N,), tl.float32)
    db = tl.zeros((BLOCK_N,), tl.float32)
    inv_n = tl.div_rn(1.0, N + 0.0)
    for block in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=NUM_STAGES):
        # Load a block of rows of x and dy
        row_idx = block * ROWS + tl.arange(0, ROWS)
        row_offsets = row_idx.to(tl.int64)[:, None]
        mask = (row_idx[:, None] < M) & col_mask[None, :]
        x_fp32 = tl.load(x + row_offsets * stride_x + col_offsets[None, :], mask=mask, other=0.0).to(tl.float32)
        dy_fp32 = tl.load(dy + row_offsets * stride_dy + col_offsets[None, :], mask=mask, other=0.0).to(tl.float32)
        # Recompute mean and rstd
        centred, variance = _centred(x_fp32, mask, inv_n)
        rstd = tl.where(row_idx < M, tl.rsqrt(variance + eps), 0.0)[:, None]  # infinite for a masked row if eps is 0
        x_hat = centred * rstd
        # Compute and store dx
        wdy = dy_fp32 * w[None, :]
        mean_wdy, mean_wdy_x_hat = (tl.sum(wdy, 1) * inv_n)[:, None], (tl.sum(wdy * x_hat, 1) * inv_n)[:, None]
        dx_fp32 = (wdy - mean_wdy - x_hat * mean_wdy_x_hat) * rstd
        tl.store(dx + row_offsets * N + col_offsets[None, :], dx_fp32.to(dx.dtype.element_ty), mask=mask)
        # Accumulate dw and db
        if AFFINE:
            dw += tl.sum(dy_fp32 * x_hat, 0)
            db += tl.sum(dy_fp32, 0)
    # Store this program's partial dw and db
    if AFFINE:
        partial_offsets = tl.program_id(0).to(tl.int64) * N + col_offsets
        tl.store(dw_partial + partial_offsets, dw, mask=col_mask)
        tl.store(db_partial + partial_offsets, db, mask=col_mask)


@triton.jit
def _layer_norm_backward_long_kernel(
    dx, means, rstds, dy, x, weight, N, stride_dy, stride_x, eps, BLOCK_N: tl.constexpr,  # means, rstds: (M,)
):  # fmt: skip
    """dx as above, one row a program; writes mean and rstd too."""
    # Mean and rstd, in two reads of x
    row_idx = tl.program_id(0).to(tl.int64)
    mean, rstd = _row_statistics(x, row_idx, N, stride_x, eps, BLOCK_N)
    tl.store(means + row_idx, mean)
    tl.store(rstds + row_idx, rstd)
    # Third read: sum(wdy) and dot(wdy, x_hat)
    sum_wdy = tl.zeros((BLOCK_N,), tl.float32)
    sum_wdy_x_hat = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        col_offsets = start + tl.arange(0, BLOCK_N)
        mask = col_offsets < N
        w = load_weight(weight, col_offsets, mask)
        wdy = tl.load(dy + row_idx * stride_dy + col_offsets, mask=mask, other=0.0).to(tl.float32) * w
        x_hat = (tl.load(x + row_idx * stride_x + col_offsets, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        sum_wdy += wdy
        sum_wdy_x_hat += wdy * x_hat  # wdy is 0 beyond N
    inv_n = tl.div_rn(1.0, N + 0.0)
    mean_wdy, mean_wdy_x_hat = tl.sum(sum_wdy, 0) * inv_n, tl.sum(sum_wdy_x_hat, 0) * inv_n
    # Fourth read: dx
    for start in range(0, N, BLOCK_N):
        col_offsets = start + tl.arange(0, BLOCK_N)
        mask = col_offsets < N
        w = load_weight(weight, col_offsets, mask)
        wdy = tl.load(dy + row_idx * stride_dy + col_offsets, mask=mask, other=0.0).to(tl.float32) * w
        x_hat = (tl.load(x + row_idx * stride_x + col_offsets, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        dx_fp32 = (wdy - mean_wdy - x_hat * mean_wdy_x_hat) * rstd
        tl.store(dx + row_idx * N + col_offsets, dx_fp32.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _layer_norm_affine_long_kernel(
    dweight, dbias, dy, x, means, rstds, M, N, stride_dy, stride_x,  # dweight, dbias: (N,)
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dw = sum(dy * x_hat) and db = sum(dy) over the rows.  BLOCK_N columns a program."""
    col_offsets = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = col_offsets < N
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, M, BLOCK_M):
        row_idx = start + tl.arange(0, BLOCK_M)
        row_offsets = row_idx.to(tl.int64)[:, None]
        mask = (row_idx[:, None] < M) & col_mask[None, :]
        mean = tl.load(means + row_idx, mask=row_idx < M, other=0.0)[:, None]
        rstd = tl.load(rstds + row_idx, mask=row_idx < M, other=0.0)[:, None]
        dy_fp32 = tl.load(dy + row_offsets * stride_dy + col_offsets[None, :], mask=mask, other=0.0).to(tl.float32)
        x_fp32 = tl.load(x + row_offsets * stride_x + col_offsets[None, :], mask=mask, other=0.0).to(tl.float32)
        dw += dy_fp32 * (x_fp32 - mean) * rstd
        db += dy_fp32
    tl.store(dweight + col_offsets, tl.sum(dw, 0).to(dweight.dtype.element_ty), mask=col_mask)
    tl.store(dbias + col_offsets, tl.sum(db, 0).to(dbias.dtype.element_ty), mask=col_mask)


_forward = TritonKernel(_layer_norm_kernel)
_forward_long = TritonKernel(_layer_norm_long_kernel)
_backward = TritonKernel(_layer_norm_backward_kernel)
_backward_long = TritonKernel(_layer_norm_backward_long_kernel)
_affine_long = TritonKernel(_layer_norm_affine_long_kernel)


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=row_blocks.every(configure),
    candidates=row_blocks.candidates,
)
def launch(outs: tuple[Tensor], args: LayerNormArgs, config: Config) -> None:
    (y,) = outs
    x, weight, bias = as_rows(args.x), contiguous(args.weight), contiguous(args.bias)
    m, n = x.shape
    block_n = triton.next_power_of_2(n)
    if block_n > MAX_BLOCK:
        _forward_long((m,), (y, x, weight, bias, n, x.stride(0), args.eps), (4096,), num_warps=8)
        return
    parameters = (y, x, weight, bias, m, n, x.stride(0), args.eps)
    _forward((triton.cdiv(m, config.rows),), parameters, (config.rows, block_n), num_warps=config.num_warps)


@register_kernel(
    BACKWARD,
    configure=row_blocks.configure_backward,
    config_type=PersistentConfig,
    configs=row_blocks.every(row_blocks.configure_backward),
    candidates=row_blocks.candidates_backward,
)
def launch_backward(outs: tuple[Tensor, Tensor, Tensor], args: LayerNormBackwardArgs, config: PersistentConfig) -> None:
    dx, dweight, dbias = outs
    affine = args.need_dweight or args.need_dbias
    dy, x, weight = as_rows(args.dy), as_rows(args.x), contiguous(args.weight)
    m, n = x.shape
    strides = (dy.stride(0), x.stride(0))
    block_n = triton.next_power_of_2(n)
    if block_n > MAX_BLOCK:
        means, rstds = scratch((m,), torch.float32, x.device), scratch((m,), torch.float32, x.device)
        parameters = (dx, means, rstds, dy, x, weight, n, *strides, args.eps)
        _backward_long((m,), parameters, (2048,), num_warps=8)
        if affine:
            # The kernel writes both; a gradient that is not needed goes to scratch
            dw, db = (t if t.numel() else x.new_empty(n) for t in (dweight, dbias))
            _affine_long((triton.cdiv(n, 64),), (dw, db, dy, x, means, rstds, m, n, *strides), (64, 64), num_warps=8)
        return
    programs = row_blocks.programs(m, config, x.device)
    partials = scratch((2, programs if affine else 1, n), torch.float32, x.device)
    dw_partial, db_partial = partials[0], partials[1]
    parameters = (dx, dw_partial, db_partial, dy, x, weight, m, n, *strides, args.eps)
    constants = (affine, config.rows, block_n, config.num_stages)
    _backward((programs,), parameters, constants, num_warps=config.num_warps)
    affine_sums(dweight, dbias, partials)
