"""RMSNorm in Triton.  A program holds whole rows in registers: one read of x, one write of y, statistics in between.

Traffic: forward 4*M*N bytes at bf16, so 8192x4096 cannot beat 32 us at 4.2 TB/s; backward reads dy and x and writes
dx, 6*M*N, 48 us.  The backward recomputes 1/rms from the row it reads anyway, so the forward saves no statistics.  Its
weight gradient is accumulated in registers by a fixed set of programs and reduced in a fixed order (`column_sums`).
Rows too long for registers are read twice; the second read comes from L2.
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
from tilewright.ops.norm.column_sums import column_sums
from tilewright.ops.rows import as_rows

MAX_BLOCK = 16384  # 64 KB of float32 in registers at 16 warps; above, the row is walked in blocks


class Config(NamedTuple):
    rows: int  # of one program
    num_warps: int


class WalkConfig(NamedTuple):
    """Programs that walk over the rows, so that each leaves one partial weight gradient."""

    rows: int
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


def configure_backward(bucket: tuple[int, ...], dtype: torch.dtype) -> WalkConfig:
    _, n = bucket
    block = min(triton.next_power_of_2(n), MAX_BLOCK)
    if block <= 512:
        rows = max(1, min(8, 4096 // (block * dtype.itemsize)))
        return WalkConfig(rows, num_warps=4, num_stages=2, waves=4)
    if dtype.itemsize > 2:  # two stages of one row: three of two would not fit the shared memory of an A100
        return WalkConfig(rows=1, num_warps=min(16, max(4, block // 512)), num_stages=2, waves=2)
    # Rows in flight and two more on the way hide the reductions: 55.6 us with two rows, 57.2 with one at 8192x4096;
    # 34.6 us with four, 36.8 with two for LayerNorm at 8192x1600 (H200, 2026-11)
    if block <= 2048:
        return WalkConfig(rows=4, num_warps=4, num_stages=3, waves=2)
    rows = 2 if block <= 4096 else 1
    return WalkConfig(rows, num_warps=min(16, rows * block // 1024), num_stages=3, waves=1)


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """4 to 64 elements of a row in each thread."""
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


def candidates_backward(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[WalkConfig, ...]:
    """8 to 64 elements of dy and of x in each thread; the rows on the way fit the shared memory of an H200."""
    m, n = bucket
    block = triton.next_power_of_2(n)
    if block > MAX_BLOCK:
        return ()
    return tuple(
        WalkConfig(rows, warps, stages, waves)
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
    """All that `choose` can return."""
    sizes = [(m, 1 << k) for m in (1, 1 << 13, 1 << 20) for k in range(15)]
    return tuple(dict.fromkeys(choose(bucket, dtype) for bucket in sizes for dtype in (torch.bfloat16, torch.float32)))


@triton.jit
def mean_of(total, N):
    """A sum over N, correctly rounded: Triton's own division is off by 2 ULP, which a difference after it shows."""
    return tl.div_rn(total, N + 0.0)


@triton.jit
def normalise_rows(
    total, x, residual, weight, M, N, stride_x, stride_r, eps, offset,  # total, x, residual: (M, N)  weight: (N,)
    ADD: tl.constexpr, FP32_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """This program's rows in float32, not yet rounded; with their places: (ROWS, 1), (BLOCK_N,), mask."""
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    w = tl.load(weight + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    offs_m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = offs_m.to(tl.int64)[:, None]
    mask = (offs_m[:, None] < M) & mask_n[None, :]
    row = tl.load(x + at * stride_x + offs_n[None, :], mask=mask, other=0.0)
    if ADD:  # the sum is rounded to its dtype before it is normalised, as in the model
        other = tl.load(residual + at * stride_r + offs_n[None, :], mask=mask, other=0.0)
        row = (row.to(tl.float32) + other.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at * N + offs_n[None, :], row, mask=mask)
    wide = row.to(tl.float32)
    normed = wide * tl.rsqrt(mean_of(tl.sum(wide * wide, 1), N) + eps)[:, None]
    if FP32_WEIGHT:
        result = normed * (offset + w)[None, :]
    else:  # round to x's dtype before the weight, as the models do
        result = normed.to(x.dtype.element_ty).to(tl.float32) * w[None, :]
    return result, at, offs_n, mask


@triton.jit
def _rms_norm_kernel(
    y, total, x, residual, weight, M, N, stride_x, stride_r, eps, offset,  # y: (M, N)
    ADD: tl.constexpr, FP32_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    result, at, offs_n, mask = normalise_rows(
        total, x, residual, weight, M, N, stride_x, stride_r, eps, offset, ADD, FP32_WEIGHT, ROWS, BLOCK_N
    )
    tl.store(y + at * N + offs_n[None, :], result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def rstd_of_row(x, residual, row, N, stride_x, stride_r, eps, ADD: tl.constexpr, BLOCK_N: tl.constexpr):
    """1 / rms of one long row."""
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        wide = _load_sum(x, residual, row, start + tl.arange(0, BLOCK_N), N, stride_x, stride_r, ADD)
        squares += wide * wide
    return tl.rsqrt(mean_of(tl.sum(squares, 0), N) + eps)


@triton.jit
def normalise_block(
    total, x, residual, weight, row, rstd, offs_n, N, stride_x, stride_r, offset,
    ADD: tl.constexpr, FP32_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Elements `offs_n` of a long row in float32, not yet rounded."""
    mask = offs_n < N
    wide = _load_sum(x, residual, row, offs_n, N, stride_x, stride_r, ADD)
    if ADD:
        tl.store(total + row * N + offs_n, wide.to(total.dtype.element_ty), mask=mask)
    w = tl.load(weight + offs_n, mask=mask, other=0.0).to(tl.float32)
    if FP32_WEIGHT:
        result = wide * rstd * (offset + w)
    else:
        result = (wide * rstd).to(x.dtype.element_ty).to(tl.float32) * w
    return result


@triton.jit
def _load_sum(x, residual, row, offs_n, N, stride_x, stride_r, ADD: tl.constexpr):
    """A block of x, or of x + residual rounded to x's dtype, in float32."""
    value = tl.load(x + row * stride_x + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * stride_r + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _rms_norm_long_kernel(
    y, total, x, residual, weight, N, stride_x, stride_r, eps, offset,  # y, total, x, residual: (M, N)   weight: (N,)
    ADD: tl.constexpr, FP32_WEIGHT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    rstd = rstd_of_row(x, residual, row, N, stride_x, stride_r, eps, ADD, BLOCK_N)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        result = normalise_block(
            total, x, residual, weight, row, rstd, offs_n, N, stride_x, stride_r, offset, ADD, FP32_WEIGHT
        )
        tl.store(y + row * N + offs_n, result.to(y.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _rms_norm_backward_kernel(
    dx, partial, dy, x, weight, dtotal, M, N, stride_dy, stride_x, stride_dt, eps, offset,
    ADD: tl.constexpr, FP32_WEIGHT: tl.constexpr, NEED_DWEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip  # dx, dy, x, dtotal: (M, N)   partial: (programs, N)   weight: (N,)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    w = tl.load(weight + offs_n, mask=mask_n, other=0.0).to(tl.float32) + offset
    dw = tl.zeros((BLOCK_N,), tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=NUM_STAGES):
        offs_m = block * ROWS + tl.arange(0, ROWS)
        mask = (offs_m[:, None] < M) & mask_n[None, :]
        at = offs_m.to(tl.int64)[:, None]
        wide = tl.load(x + at * stride_x + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(dy + at * stride_dy + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(mean_of(tl.sum(wide * wide, 1), N) + eps)
        rstd = tl.where(offs_m < M, rstd, 0.0)[:, None]  # without eps that of no row is infinite
        normed = wide * rstd
        g = grad * w[None, :]
        # d(x * rstd)/dx: the part of g along x is taken out
        result = (g - normed * mean_of(tl.sum(g * normed, 1), N)[:, None]) * rstd
        if ADD:
            result += tl.load(dtotal + at * stride_dt + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + at * N + offs_n[None, :], result.to(dx.dtype.element_ty), mask=mask)
        if NEED_DWEIGHT:
            if not FP32_WEIGHT:
                normed = normed.to(x.dtype.element_ty).to(tl.float32)
            dw += tl.sum(grad * normed, 0)
    if NEED_DWEIGHT:
        tl.store(partial + tl.program_id(0).to(tl.int64) * N + offs_n, dw, mask=mask_n)


@triton.jit
def _rms_norm_backward_long_kernel(
    dx, rstds, dy, x, weight, dtotal, N, stride_dy, stride_x, stride_dt, eps, offset,  # rstds: (M,)
    ADD: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    products = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask = offs_n < N
        wide = tl.load(x + row * stride_x + offs_n, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(weight + offs_n, mask=mask, other=0.0).to(tl.float32) + offset
        g = tl.load(dy + row * stride_dy + offs_n, mask=mask, other=0.0).to(tl.float32) * w
        squares += wide * wide
        products += g * wide
    rstd = tl.rsqrt(mean_of(tl.sum(squares, 0), N) + eps)
    mean = mean_of(tl.sum(products, 0) * rstd, N)
    tl.store(rstds + row, rstd)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask = offs_n < N
        normed = tl.load(x + row * stride_x + offs_n, mask=mask, other=0.0).to(tl.float32) * rstd
        w = tl.load(weight + offs_n, mask=mask, other=0.0).to(tl.float32) + offset
        g = tl.load(dy + row * stride_dy + offs_n, mask=mask, other=0.0).to(tl.float32) * w
        result = (g - normed * mean) * rstd
        if ADD:
            result += tl.load(dtotal + row * stride_dt + offs_n, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + row * N + offs_n, result.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_dweight_long_kernel(
    dweight, dy, x, rstds, M, N, stride_dy, stride_x,  # dweight: (N,)   rstds: (M,)
    FP32_WEIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, M, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        at = offs_m.to(tl.int64)[:, None]
        mask = (offs_m[:, None] < M) & mask_n[None, :]
        rstd = tl.load(rstds + offs_m, mask=offs_m < M, other=0.0)[:, None]
        normed = tl.load(x + at * stride_x + offs_n[None, :], mask=mask, other=0.0).to(tl.float32) * rstd
        if not FP32_WEIGHT:
            normed = normed.to(x.dtype.element_ty).to(tl.float32)
        acc += tl.load(dy + at * stride_dy + offs_n[None, :], mask=mask, other=0.0).to(tl.float32) * normed
    tl.store(dweight + offs_n, tl.sum(acc, 0).to(dweight.dtype.element_ty), mask=mask_n)


_forward = TritonKernel(_rms_norm_kernel)
_forward_long = TritonKernel(_rms_norm_long_kernel)
_backward = TritonKernel(_rms_norm_backward_kernel)
_backward_long = TritonKernel(_rms_norm_backward_long_kernel)
_dweight_long = TritonKernel(_rms_norm_dweight_long_kernel)


def programs(m: int, config: WalkConfig, device: torch.device) -> int:
    """How many programs walk over `m` rows."""
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
    """Normalise x, or with `residual` the sum, which is left in `total`."""
    rows, weight = as_rows(x), weight.contiguous()
    other = None if residual is None else as_rows(residual)
    m, n = rows.shape
    block = triton.next_power_of_2(n)
    add = other is not None
    strides = (rows.stride(0), 0 if other is None else other.stride(0))
    if block > MAX_BLOCK:
        args = (y, total, rows, other, weight, n, *strides, eps, offset)
        _forward_long((m,), args, (add, fp32_weight, 4096), num_warps=8)
    else:
        args = (y, total, rows, other, weight, m, n, *strides, eps, offset)
        grid = (triton.cdiv(m, config.rows),)
        _forward(grid, args, (add, fp32_weight, config.rows, block), num_warps=config.num_warps)


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
    config: WalkConfig,
) -> None:
    """Gradient of the norm at x; `dtotal`, the gradient that reaches the sum directly, is added to dx."""
    grads, rows, weight = as_rows(dy), as_rows(x), weight.contiguous()
    other = None if dtotal is None else as_rows(dtotal)
    m, n = rows.shape
    block = triton.next_power_of_2(n)
    add = other is not None
    strides = (grads.stride(0), rows.stride(0), 0 if other is None else other.stride(0))
    if block > MAX_BLOCK:
        rstds = scratch((m,), torch.float32, x.device)
        args = (dx, rstds, grads, rows, weight, other, n, *strides, eps, offset)
        _backward_long((m,), args, (add, 4096), num_warps=8)
        if need_dweight:
            args = (dweight, grads, rows, rstds, m, n, *strides[:2])
            _dweight_long((triton.cdiv(n, 64),), args, (fp32_weight, 64, 64), num_warps=8)
        return
    count = programs(m, config, x.device)
    partial = scratch((count if need_dweight else 1, n), torch.float32, x.device)
    args = (dx, partial, grads, rows, weight, other, m, n, *strides, eps, offset)
    constants = (add, fp32_weight, need_dweight, config.rows, block, config.num_stages)
    _backward((count,), args, constants, num_warps=config.num_warps)
    if need_dweight:
        column_sums(dweight, partial)


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
    config_type=WalkConfig,
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
    config: WalkConfig,
) -> None:
    run_backward(outs[0], outs[1], dy, None, x, weight, eps, offset, fp32_weight, need_dweight, config)
