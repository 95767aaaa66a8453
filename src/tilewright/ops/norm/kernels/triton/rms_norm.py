"""RMSNorm in Triton.  A program holds whole rows in registers: one read of x, one write of y, statistics in between.

Traffic: forward 4*M*N bytes at bf16, so 8192x4096 cannot beat 32 us at 4.2 TB/s; backward reads dy and x and writes
dx, 6*M*N, 48 us.  The backward reads x in any case and recomputes rstd = 1/rms from it, so the forward saves nothing.
A fixed number of programs accumulates the weight gradient in registers; `column_sums` adds their results in a fixed
order.  Rows too long for registers take the kernels of `triton_long.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.hardware import device_info
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.norm.kernels.triton.column_sums import column_sums, mean_of
from tilewright.ops.norm.kernels.triton.long_rows import run_backward_long, run_forward_long
from tilewright.ops.rows import as_rows

MAX_BLOCK = 16384  # 64 KB of float32 in registers at 16 warps; longer rows are read in blocks, twice


class Config(NamedTuple):
    rows: int  # rows per program
    num_warps: int


class PersistentConfig(NamedTuple):
    """Persistent programs: each loops over blocks of rows and leaves one partial weight gradient."""

    rows: int  # rows per block
    num_warps: int
    num_stages: int
    waves: int  # programs per SM


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    m, n = bucket
    block = min(triton.next_power_of_2(n), MAX_BLOCK)
    if block <= 512:
        return Config(rows=max(1, min(8, 2048 // block)), num_warps=4)
    if m * block >= 1 << 26 and block <= 8192:
        # Large problems: 32 values a thread and 16 warps, 131.0 us against 132.1 at 32768x4096 (H200, 2026-11)
        return Config(rows=16384 // block, num_warps=16)
    # 16 values a thread: at N=4096 8 warps beat 4 and 16 from 1 row to 8192 (34.8 us against 35.2 and 36.0; H200,
    # 2026-11)
    return Config(rows=1, num_warps=min(16, max(4, block // 512)))


def configure_backward(bucket: tuple[int, ...], dtype: torch.dtype) -> PersistentConfig:
    _, n = bucket
    block = min(triton.next_power_of_2(n), MAX_BLOCK)
    if block <= 512:
        rows = max(1, min(8, 4096 // (block * dtype.itemsize)))
        return PersistentConfig(rows, num_warps=4, num_stages=2, waves=4)
    if dtype.itemsize > 2:  # two stages of one row: three of two would not fit the shared memory of an A100
        return PersistentConfig(rows=1, num_warps=min(16, max(4, block // 512)), num_stages=2, waves=2)
    # Several rows a block, and two more blocks in flight, hide the reductions: 55.6 us with two rows, 57.2 with one at
    # 8192x4096; 34.6 us with four, 36.8 with two for LayerNorm at 8192x1600 (H200, 2026-11)
    if block <= 2048:
        return PersistentConfig(rows=4, num_warps=4, num_stages=3, waves=2)
    rows = 2 if block <= 4096 else 1
    return PersistentConfig(rows, num_warps=min(16, rows * block // 1024), num_stages=3, waves=1)


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Configurations with 4 to 64 elements of x a thread."""
    m, n = bucket
    block = triton.next_power_of_2(n)
    if block > MAX_BLOCK:
        return ()
    return tuple(
        Config(rows, warps)
        for rows in (1, 2, 4, 8, 16, 32)
        for warps in (1, 2, 4, 8, 16, 32)
        if rows <= m and 4 <= rows * block // (32 * warps) <= 64 and rows * block <= 2 * MAX_BLOCK
    )


def candidates_backward(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[PersistentConfig, ...]:
    """Configurations with 8 to 64 elements of dy and of x a thread; the stages fit the shared memory of an H200."""
    m, n = bucket
    block = triton.next_power_of_2(n)
    if block > MAX_BLOCK:
        return ()
    return tuple(
        PersistentConfig(rows, warps, stages, waves)
        for rows in (1, 2, 4, 8)
        for warps in (4, 8, 16)
        for stages in (2, 3, 4)
        for waves in (1, 2, 4)
        if rows <= m
        and 8 <= rows * block // (32 * warps) <= 64
        and waves * stages * 2 * rows * block * dtype.itemsize <= 200 << 10
        and 8 <= waves * warps <= 32
    )


def every(choose: Callable[[tuple[int, ...], torch.dtype], Any]) -> tuple[Any, ...]:
    """All configurations that `choose` can return."""
    sizes = [(m, 1 << k) for m in (1, 1 << 13, 1 << 20) for k in range(15)]
    return tuple(dict.fromkeys(choose(bucket, dtype) for bucket in sizes for dtype in (torch.bfloat16, torch.float32)))


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
    w = tl.load(weight + col_offsets, mask=col_mask, other=0.0).to(tl.float32)
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
def _rms_norm_kernel(
    y, total, x, residual, weight, M, N, stride_x, stride_r, eps, offset,  # y: (M, N)
    ADD: tl.constexpr, FP32_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = x_hat * (offset + weight), x_hat = x * rstd, rstd = 1 / sqrt(mean(x^2) + eps)."""
    y_fp32, row_offsets, col_offsets, mask = normalise_rows(
        total, x, residual, weight, M, N, stride_x, stride_r, eps, offset, ADD, FP32_WEIGHT, ROWS, BLOCK_N
    )
    tl.store(y + row_offsets * N + col_offsets[None, :], y_fp32.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_backward_kernel(
    dx, dw_partial, dy, x, weight, dtotal, M, N, stride_dy, stride_x, stride_dt, eps, offset,
    ADD: tl.constexpr, FP32_WEIGHT: tl.constexpr, NEED_DWEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip  # dx, dy, x, dtotal: (M, N)   dw_partial: (programs, N)   weight: (N,)
    """With w = offset + weight, wdy = w * dy (elementwise) and x_hat = x * rstd, for each row:

        dx = rstd * (wdy - x_hat * (1 / N) * dot(wdy, x_hat))   [+ dtotal if ADD]

    and, summed over the rows, dw = sum(dy * x_hat), x_hat rounded to x's dtype unless FP32_WEIGHT.
    """
    # Load the weight
    col_offsets = tl.arange(0, BLOCK_N)
    col_mask = col_offsets < N
    w = tl.load(weight + col_offsets, mask=col_mask, other=0.0).to(tl.float32) + offset
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
        if ADD:
            dtotal_block = tl.load(dtotal + row_offsets * stride_dt + col_offsets[None, :], mask=mask, other=0.0)
            dx_fp32 += dtotal_block.to(tl.float32)
        tl.store(dx + row_offsets * N + col_offsets[None, :], dx_fp32.to(dx.dtype.element_ty), mask=mask)
        # Accumulate dw
        if NEED_DWEIGHT:
            if not FP32_WEIGHT:
                x_hat = x_hat.to(x.dtype.element_ty).to(tl.float32)
            dw += tl.sum(dy_fp32 * x_hat, 0)
    # Store this program's partial dw
    if NEED_DWEIGHT:
        tl.store(dw_partial + tl.program_id(0).to(tl.int64) * N + col_offsets, dw, mask=col_mask)


_forward = TritonKernel(_rms_norm_kernel)
_backward = TritonKernel(_rms_norm_backward_kernel)


def programs(m: int, config: PersistentConfig, device: torch.device) -> int:
    """Number of persistent programs for `m` rows."""
    return min(-(-m // config.rows), config.waves * device_info(device).sm_count)


def run_forward(
    y: Tensor,
    total: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    offset: float,
    fp32_weight: bool,
    config: Config,
) -> None:
    """Normalise x into y.  With a residual: normalise total = x + residual, and write total."""
    x_rows, weight = as_rows(x), weight.contiguous()
    residual_rows = None if residual is None else as_rows(residual)
    m, n = x_rows.shape
    block_n = triton.next_power_of_2(n)
    if block_n > MAX_BLOCK:
        run_forward_long(y, total, x_rows, residual_rows, weight, eps, offset, fp32_weight)
        return
    add = residual_rows is not None
    strides = (x_rows.stride(0), residual_rows.stride(0) if add else 0)
    args = (y, total, x_rows, residual_rows, weight, m, n, *strides, eps, offset)
    grid = (triton.cdiv(m, config.rows),)
    _forward(grid, args, (add, fp32_weight, config.rows, block_n), num_warps=config.num_warps)


def run_backward(
    dx: Tensor,
    dweight: Tensor,
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    fp32_weight: bool,
    need_dweight: bool,
    config: PersistentConfig,
) -> None:
    """Write dx, and dweight if needed.  `dtotal`, the gradient of the returned sum itself, is added to dx."""
    dy_rows, x_rows, weight = as_rows(dy), as_rows(x), weight.contiguous()
    dtotal_rows = None if dtotal is None else as_rows(dtotal)
    m, n = x_rows.shape
    block_n = triton.next_power_of_2(n)
    if block_n > MAX_BLOCK:
        run_backward_long(dx, dweight, dy_rows, dtotal_rows, x_rows, weight, eps, offset, fp32_weight, need_dweight)
        return
    add = dtotal_rows is not None
    num_programs = programs(m, config, x.device)
    dw_partial = scratch((num_programs if need_dweight else 1, n), torch.float32, x.device)
    strides = (dy_rows.stride(0), x_rows.stride(0), dtotal_rows.stride(0) if add else 0)
    args = (dx, dw_partial, dy_rows, x_rows, weight, dtotal_rows, m, n, *strides, eps, offset)
    constants = (add, fp32_weight, need_dweight, config.rows, block_n, config.num_stages)
    _backward((num_programs,), args, constants, num_warps=config.num_warps)
    if need_dweight:
        column_sums(dweight, dw_partial)


@register_impl(
    "rms_norm",
    backend="triton",
    configure=configure,
    config_type=Config,
    configs=every(configure),
    candidates=candidates,
)
def launch(
    outs: tuple[Tensor], x: Tensor, weight: Tensor, eps: float, offset: float, fp32_weight: bool, *, config: Config
) -> None:
    run_forward(outs[0], None, x, None, weight, eps, offset, fp32_weight, config)


@register_impl(
    "rms_norm",
    backend="triton",
    direction="bwd",
    configure=configure_backward,
    config_type=PersistentConfig,
    configs=every(configure_backward),
    candidates=candidates_backward,
)
def launch_backward(
    outs: tuple[Tensor, Tensor],
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    fp32_weight: bool,
    need_dweight: bool,
    *,
    config: PersistentConfig,
) -> None:
    run_backward(outs[0], outs[1], dy, None, x, weight, eps, offset, fp32_weight, need_dweight, config)
