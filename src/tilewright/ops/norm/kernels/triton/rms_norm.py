"""RMSNorm in Triton.  A program holds whole rows in registers: one read of x, one write of y, statistics in between.

Forward:   rstd = 1 / sqrt(mean(x^2) + eps), x_hat = x * rstd, y = x_hat * w, with w = offset + weight.
Backward:  with wdy = w * dy (elementwise), for each row,
               dx = rstd * (wdy - x_hat * (1 / N) * dot(wdy, x_hat))
           and, summed over the rows, dweight = sum(dy * x_hat).
Without fp32_weight x_hat is rounded to x's dtype before it is multiplied by the weight, and so in dweight.

The backward reads x in any case and recomputes rstd from it, so the forward saves nothing.  A fixed number of programs
accumulates the weight gradient in registers; `column_sums` adds their results in a fixed order.
Traffic: forward 4*M*N bytes at bf16, so 8192x4096 cannot beat 32 us at 4.2 TB/s; backward reads dy and x and writes
dx, 6*M*N, 48 us.  Rows too long for registers take the kernels of `long_rows.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.dependent import DependentKernel, wait_and_launch_dependents
from tilewright.ops.norm.kernels.triton import long_rows, row_blocks
from tilewright.ops.norm.kernels.triton.affine import load_weight
from tilewright.ops.norm.kernels.triton.column_sums import column_sums, mean_of
from tilewright.ops.norm.kernels.triton.row_blocks import MAX_BLOCK, Config, PersistentConfig
from tilewright.ops.norm.rms_norm import BACKWARD, FORWARD, RmsNormArgs, RmsNormBackwardArgs
from tilewright.ops.rows import PlainRowsBucket, RowsBucket, as_rows, contiguous


def configure(bucket: RowsBucket | PlainRowsBucket, dtype: torch.dtype) -> Config:
    block = min(triton.next_power_of_2(bucket.N), MAX_BLOCK)
    if block <= 512:
        return Config(rows=max(1, min(8, 2048 // block)), num_warps=4)
    if bucket.M >= 512 and 4096 < bucket.N < block <= 8192:
        # Lanes beyond the row: one row a program, 52.7 us against 54.1 with two at 5000x7168 (H100, 2026-11); with 8
        # warps 528 rows are on the chip at once, with 16 half as many
        return Config(rows=1, num_warps=8)
    if bucket.M * block >= 1 << 26 and block <= 8192:
        # Large problems: 32 values a thread and 16 warps, 131.0 us against 132.1 at 32768x4096 (H200, 2026-11)
        return Config(rows=16384 // block, num_warps=16)
    # 16 values a thread: at N=4096 8 warps beat 4 and 16 from 1 row to 8192 (34.8 us against 35.2 and 36.0; H200,
    # 2026-11)
    return Config(rows=1, num_warps=min(16, max(4, block // 512)))


@triton.jit
def _rms_norm_kernel(
    y, x, weight, M, N, stride_x, eps, offset,  # y, x: (M, N)   weight: (N,)
    FP32_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_and_launch_dependents(DEPENDENT)
    # Load the weight
    col_offsets = tl.arange(0, BLOCK_N)
    col_mask = col_offsets < N
    w = load_weight(weight, col_offsets, col_mask)
    # Load the rows
    row_idx = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_offsets = row_idx.to(tl.int64)[:, None]
    mask = (row_idx[:, None] < M) & col_mask[None, :]
    x_fp32 = tl.load(x + row_offsets * stride_x + col_offsets[None, :], mask=mask, other=0.0).to(tl.float32)
    # Normalise
    rstd = tl.rsqrt(mean_of(tl.sum(x_fp32 * x_fp32, 1), N) + eps)
    x_hat = x_fp32 * rstd[:, None]
    # Scale by the weight and store
    if FP32_WEIGHT:
        y_fp32 = x_hat * (offset + w)[None, :]
    else:  # round to x's dtype before the weight, as the models do
        y_fp32 = x_hat.to(x.dtype.element_ty).to(tl.float32) * w[None, :]
    tl.store(y + row_offsets * N + col_offsets[None, :], y_fp32.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_backward_kernel(
    dx, dw_partial, dy, x, weight, M, N, stride_dy, stride_x, eps, offset,  # dw_partial: (programs, N)
    FP32_WEIGHT: tl.constexpr, NEED_DWEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # Load the weight
    col_offsets = tl.arange(0, BLOCK_N)
    col_mask = col_offsets < N
    w = load_weight(weight, col_offsets, col_mask) + offset
    dw = tl.zeros((BLOCK_N,), tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=NUM_STAGES):
        # Load a block of rows of x and dy
        row_idx = block * ROWS + tl.arange(0, ROWS)
        mask = (row_idx[:, None] < M) & col_mask[None, :]
        row_offsets = row_idx.to(tl.int64)[:, None]
        x_fp32 = tl.load(x + row_offsets * stride_x + col_offsets[None, :], mask=mask, other=0.0).to(tl.float32)
        dy_fp32 = tl.load(dy + row_offsets * stride_dy + col_offsets[None, :], mask=mask, other=0.0).to(tl.float32)
        # Recompute rstd
        rstd = tl.rsqrt(mean_of(tl.sum(x_fp32 * x_fp32, 1), N) + eps)
        rstd = tl.where(row_idx < M, rstd, 0.0)[:, None]  # a masked row is 0: its rstd is infinite if eps is 0
        x_hat = x_fp32 * rstd
        # Compute and store dx
        wdy = dy_fp32 * w[None, :]
        dx_fp32 = (wdy - x_hat * mean_of(tl.sum(wdy * x_hat, 1), N)[:, None]) * rstd
        tl.store(dx + row_offsets * N + col_offsets[None, :], dx_fp32.to(dx.dtype.element_ty), mask=mask)
        # Accumulate dw
        if NEED_DWEIGHT:
            if not FP32_WEIGHT:
                x_hat = x_hat.to(x.dtype.element_ty).to(tl.float32)
            dw += tl.sum(dy_fp32 * x_hat, 0)
    # Store this program's partial dw
    if NEED_DWEIGHT:
        tl.store(dw_partial + tl.program_id(0).to(tl.int64) * N + col_offsets, dw, mask=col_mask)


_forward = DependentKernel(_rms_norm_kernel)
_backward = TritonKernel(_rms_norm_backward_kernel)


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=row_blocks.every(configure),
    candidates=row_blocks.candidates,
)
def launch(outs: tuple[Tensor], args: RmsNormArgs, config: Config) -> None:
    (y,) = outs
    x, weight = as_rows(args.x), contiguous(args.weight)
    m, n = x.shape
    block_n = triton.next_power_of_2(n)
    if block_n > MAX_BLOCK:
        long_rows.launch(y, None, x, None, args._replace(weight=weight))
        return
    parameters = (y, x, weight, m, n, x.stride(0), args.eps, args.offset)
    grid = (triton.cdiv(m, config.rows),)
    _forward(grid, parameters, (args.fp32_weight, config.rows, block_n), num_warps=config.num_warps)


@register_kernel(
    BACKWARD,
    configure=row_blocks.configure_backward,
    config_type=PersistentConfig,
    configs=row_blocks.every(row_blocks.configure_backward),
    candidates=row_blocks.candidates_backward,
)
def launch_backward(outs: tuple[Tensor, Tensor], args: RmsNormBackwardArgs, config: PersistentConfig) -> None:
    dx, dweight = outs
    dy, x, weight = as_rows(args.dy), as_rows(args.x), contiguous(args.weight)
    m, n = x.shape
    block_n = triton.next_power_of_2(n)
    if block_n > MAX_BLOCK:
        long_rows.launch_backward(dx, dweight, dy, None, x, args._replace(weight=weight))
        return
    programs = row_blocks.programs(m, config, x.device)
    dw_partial = scratch((programs if args.need_dweight else 1, n), torch.float32, x.device)
    parameters = (dx, dw_partial, dy, x, weight, m, n, dy.stride(0), x.stride(0), args.eps, args.offset)
    constants = (args.fp32_weight, args.need_dweight, config.rows, block_n, config.num_stages)
    _backward((programs,), parameters, constants, num_warps=config.num_warps)
    if args.need_dweight:
        column_sums(dweight, dw_partial)
