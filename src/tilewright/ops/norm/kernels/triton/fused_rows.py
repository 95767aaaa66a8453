"""Residual add and RMSNorm in Triton: the kernels of `rms_norm.py` with a second input and output.

Serves add_rms_norm; `rms_norm_fp8.py` shares `normalise_rows`.
Backward:  dx as in `rms_norm.py` plus dtotal, the gradient of the returned sum itself; x and residual share it.
Traffic: forward reads x and residual, writes y and the sum, 8*M*N bytes at bf16: 8192x4096 cannot beat 64 us at 4.2
TB/s.  The two kernels of a model without fusion move 10*M*N.  Backward: reads dy, dtotal and the sum, writes one
gradient, 8*M*N.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.dependent import DependentKernel, wait_and_launch_dependents
from tilewright.ops.norm.add_rms_norm import BACKWARD, FORWARD, AddRmsNormArgs, AddRmsNormBackwardArgs
from tilewright.ops.norm.kernels.triton import long_rows, rms_norm, row_blocks
from tilewright.ops.norm.kernels.triton.affine import load_weight
from tilewright.ops.norm.kernels.triton.column_sums import column_sums, mean_of
from tilewright.ops.norm.kernels.triton.row_blocks import MAX_BLOCK, Config, PersistentConfig
from tilewright.ops.norm.rms_norm import RmsNormBackwardArgs
from tilewright.ops.rows import PlainRowsBucket, RowsBucket, as_rows, contiguous


def configure(bucket: RowsBucket | PlainRowsBucket, dtype: torch.dtype) -> Config:
    block = triton.next_power_of_2(bucket.N)
    if bucket.M >= 1024 and 2048 <= block <= 8192:
        # 64 values a thread: with two inputs and two outputs few, deep warps win, 66.6 us against 68.4 with 8 warps
        # at 8192x4096, 258.9 against 262.8 at 32768x4096 (H200, 2026-11)
        return Config(rows=1, num_warps=block // 2048)
    return rms_norm.configure(bucket, dtype)


@triton.jit
def normalise_rows(
    total, x, residual, weight, M, N, stride_x, stride_r, eps, offset,  # total, x, residual: (M, N)  weight: (N,)
    ADD: tl.constexpr, FP32_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y of this program's rows in float32, (ROWS, BLOCK_N), before it is rounded to y's dtype.

    ADD: normalise total = x + residual, and write it.
    Also returns row_offsets (ROWS, 1), col_offsets (BLOCK_N,) and the mask (ROWS, BLOCK_N).
    """
    # Load the weight
    col_offsets = tl.arange(0, BLOCK_N)
    col_mask = col_offsets < N
    w = load_weight(weight, col_offsets, col_mask)
    # Load the rows
    row_idx = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_offsets = row_idx.to(tl.int64)[:, None]
    mask = (row_idx[:, None] < M) & col_mask[None, :]
    row = tl.load(x + row_offsets * stride_x + col_offsets[None, :], mask=mask, other=0.0)
    if ADD:  # the sum is rounded to its dtype before it is normalised, as in the model
        r = tl.load(residual + row_offsets * stride_r + col_offsets[None, :], mask=mask, other=0.0)
        row = (row.to(tl.float32) + r.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row_offsets * N + col_offsets[None, :], row, mask=mask)
    # Normalise
    x_fp32 = row.to(tl.float32)
    rstd = tl.rsqrt(mean_of(tl.sum(x_fp32 * x_fp32, 1), N) + eps)
    x_hat = x_fp32 * rstd[:, None]
    # Scale by the weight
    if FP32_WEIGHT:
        y_fp32 = x_hat * (offset + w)[None, :]
    else:  # round to x's dtype before the weight, as the models do
        y_fp32 = x_hat.to(x.dtype.element_ty).to(tl.float32) * w[None, :]
    return y_fp32, row_offsets, col_offsets, mask


@triton.jit
def _add_rms_norm_kernel(
    y, total, x, residual, weight, M, N, stride_x, stride_r, eps, offset,  # y: (M, N)
    FP32_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_and_launch_dependents(DEPENDENT)
    y_fp32, row_offsets, col_offsets, mask = normalise_rows(
        total, x, residual, weight, M, N, stride_x, stride_r, eps, offset, True, FP32_WEIGHT, ROWS, BLOCK_N
    )
    tl.store(y + row_offsets * N + col_offsets[None, :], y_fp32.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _add_rms_norm_backward_kernel(
    dx, dw_partial, dy, total, weight, dtotal, M, N, stride_dy, stride_t, stride_dt, eps, offset,
    FP32_WEIGHT: tl.constexpr, NEED_DWEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip  # dx, dy, total, dtotal: (M, N)   dw_partial: (programs, N)   weight: (N,)
    """With w = offset + weight, wdy = w * dy (elementwise) and x_hat = total * rstd, for each row:

        dx = rstd * (wdy - x_hat * (1 / N) * dot(wdy, x_hat)) + dtotal

    and, summed over the rows, dw = sum(dy * x_hat), x_hat rounded to total's dtype unless FP32_WEIGHT.
    """
    # Load the weight
    col_offsets = tl.arange(0, BLOCK_N)
    col_mask = col_offsets < N
    w = load_weight(weight, col_offsets, col_mask) + offset
    dw = tl.zeros((BLOCK_N,), tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=NUM_STAGES):
        # Load a block of rows of total and dy
        row_idx = block * ROWS + tl.arange(0, ROWS)
        mask = (row_idx[:, None] < M) & col_mask[None, :]
        row_offsets = row_idx.to(tl.int64)[:, None]
        x_fp32 = tl.load(total + row_offsets * stride_t + col_offsets[None, :], mask=mask, other=0.0).to(tl.float32)
        dy_fp32 = tl.load(dy + row_offsets * stride_dy + col_offsets[None, :], mask=mask, other=0.0).to(tl.float32)
        # Recompute rstd
        rstd = tl.rsqrt(mean_of(tl.sum(x_fp32 * x_fp32, 1), N) + eps)
        rstd = tl.where(row_idx < M, rstd, 0.0)[:, None]  # a masked row is 0: its rstd is infinite if eps is 0
        x_hat = x_fp32 * rstd
        # Compute and store dx
        wdy = dy_fp32 * w[None, :]
        dx_fp32 = (wdy - x_hat * mean_of(tl.sum(wdy * x_hat, 1), N)[:, None]) * rstd
        dtotal_block = tl.load(dtotal + row_offsets * stride_dt + col_offsets[None, :], mask=mask, other=0.0)
        dx_fp32 += dtotal_block.to(tl.float32)
        tl.store(dx + row_offsets * N + col_offsets[None, :], dx_fp32.to(dx.dtype.element_ty), mask=mask)
        # Accumulate dw
        if NEED_DWEIGHT:
            if not FP32_WEIGHT:
                x_hat = x_hat.to(total.dtype.element_ty).to(tl.float32)
            dw += tl.sum(dy_fp32 * x_hat, 0)
    # Store this program's partial dw
    if NEED_DWEIGHT:
        tl.store(dw_partial + tl.program_id(0).to(tl.int64) * N + col_offsets, dw, mask=col_mask)


_forward = DependentKernel(_add_rms_norm_kernel)
_backward = TritonKernel(_add_rms_norm_backward_kernel)


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=row_blocks.every(configure),
    candidates=row_blocks.candidates,
)
def launch(outs: tuple[Tensor, Tensor], args: AddRmsNormArgs, config: Config) -> None:
    y, total = outs
    x, residual, weight = as_rows(args.x), as_rows(args.residual), contiguous(args.weight)
    m, n = x.shape
    block_n = triton.next_power_of_2(n)
    if block_n > MAX_BLOCK:
        long_rows.launch(y, total, x, residual, args._replace(weight=weight))
        return
    parameters = (y, total, x, residual, weight, m, n, x.stride(0), residual.stride(0), args.eps, args.offset)
    grid = (triton.cdiv(m, config.rows),)
    _forward(grid, parameters, (args.fp32_weight, config.rows, block_n), num_warps=config.num_warps)


@register_kernel(
    BACKWARD,
    configure=row_blocks.configure_backward,
    config_type=PersistentConfig,
    configs=row_blocks.every(row_blocks.configure_backward),
    candidates=row_blocks.candidates_backward,
)
def launch_backward(outs: tuple[Tensor, Tensor], args: AddRmsNormBackwardArgs, config: PersistentConfig) -> None:
    if args.dtotal is None:  # nothing to add: the gradient of a plain norm
        dy, _, total, *others = args
        rms_norm.launch_backward(outs, RmsNormBackwardArgs(dy, total, *others), config)
        return
    dx, dweight = outs
    dy, dtotal, total, weight = as_rows(args.dy), as_rows(args.dtotal), as_rows(args.total), contiguous(args.weight)
    m, n = total.shape
    block_n = triton.next_power_of_2(n)
    if block_n > MAX_BLOCK:
        long_rows.launch_backward(dx, dweight, dy, dtotal, total, args._replace(weight=weight))
        return
    programs = row_blocks.programs(m, config, total.device)
    dw_partial = scratch((programs if args.need_dweight else 1, n), torch.float32, total.device)
    strides = (dy.stride(0), total.stride(0), dtotal.stride(0))
    parameters = (dx, dw_partial, dy, total, weight, dtotal, m, n, *strides, args.eps, args.offset)
    constants = (args.fp32_weight, args.need_dweight, config.rows, block_n, config.num_stages)
    _backward((programs,), parameters, constants, num_warps=config.num_warps)
    if args.need_dweight:
        column_sums(dweight, dw_partial)
