"""RMSNorm in cuTile.  A block holds whole rows in registers: one read of x, one write of y, the sum in between.

Traffic: forward 4*M*N bytes at bf16, so 8192x4096 cannot beat 32 us at 4.2 TB/s; backward reads dy and x and writes
dx, 6*M*N, 48 us.  Rows are read by gather, which becomes plain 16-byte loads: a tile load of a row becomes TMA boxes of
256 elements, a third of the speed (1.1 TB/s against 3.9 at 32768x4096; H200, 2026-11).  The backward's weight gradient
is accumulated by blocks that walk over the rows and added up in a fixed order.  Rows too long for registers are read
twice; the second read comes from L2.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.hardware import device_info
from tilewright.jit.cutile_language import ct
from tilewright.jit.cutile_launch import CutileKernel, Hints
from tilewright.jit.tape import scratch
from tilewright.ops.rows import as_rows, no_float64

MAX_BLOCK = 16384  # 64 float32 a thread at 8 warps, the most there are; longer rows are walked in blocks of WALK
MAX_BLOCK_BACKWARD = 8192  # x, dy, weight and its gradient
WALK = 8192
HELD = 32768  # elements of all the blocks on an SM, which has two registers for each


class Config(NamedTuple):
    rows: int  # of one block
    num_warps: int  # 4 or 8
    occupancy: int = 0  # blocks that shall share an SM; 0: as tileiras chooses


class WalkConfig(NamedTuple):
    """Blocks that walk over the rows, so that each leaves one partial weight gradient."""

    rows: int
    num_warps: int  # 4 or 8
    waves: int  # blocks per SM


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    _, n = bucket
    block = min(next_power_of_2(n), MAX_BLOCK)
    return Config(rows=max(1, min(8, 2048 // block)), num_warps=8 if block > 4096 else 4)


CONFIGS = tuple(dict.fromkeys(configure((1, 1 << k), torch.bfloat16) for k in range(15)))


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """From 4 to 64 values a thread."""
    m, n = bucket
    block = min(next_power_of_2(n), MAX_BLOCK)
    return tuple(
        Config(rows, warps, occupancy)
        for warps in (4, 8)
        for rows in (1, 2, 4, 8, 16)
        for occupancy in (0, 4, 8)
        if rows == 1 or (rows <= m and 4 * 32 * warps <= rows * block)
        if rows * block <= 64 * 32 * warps and rows * block * max(1, occupancy) <= HELD
    )


def configure_backward(bucket: tuple[int, ...], dtype: torch.dtype) -> WalkConfig:
    _, n = bucket
    block = next_power_of_2(n)
    if block <= 2048:
        return WalkConfig(rows=max(1, min(8, 2048 // block)), num_warps=4, waves=4)
    # two float32 blocks an SM spill on sm_100 and sm_120
    return WalkConfig(rows=1, num_warps=8, waves=2 if block <= 4096 and dtype.itemsize == 2 else 1)


BACKWARD_CONFIGS = tuple(dict.fromkeys(configure_backward((1, 1 << k), torch.bfloat16) for k in range(15)))


def candidates_backward(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[WalkConfig, ...]:
    """From 4 to 32 values of each row in a thread."""
    block = next_power_of_2(bucket[1])
    if block > MAX_BLOCK_BACKWARD:
        return ()
    return tuple(
        WalkConfig(rows, warps, waves)
        for warps in (4, 8)
        for rows in (1, 2, 4, 8)
        for waves in (1, 2, 3, 4, 6)
        if rows == 1 or 4 * 32 * warps <= rows * block
        if rows * block <= 32 * 32 * warps and (rows + 1) * block * waves <= 3 * HELD // 4  # weights are two more rows
    )


def _rms_norm_kernel(
    y, total, x, residual, eps, offset, weight,  # y, total, x, residual: (M, N)   weight: (N,)
    ADD: ct.Constant[bool], FP32_WEIGHT: ct.Constant[bool], ROWS: ct.Constant[int], BLOCK_N: ct.Constant[int],
    EXACT: ct.Constant[bool],
):  # fmt: skip  # EXACT: nothing needs a mask
    offs_m = (ct.bid(0) * ROWS + ct.arange(ROWS, dtype=ct.int32))[:, None]
    offs_n = ct.arange(BLOCK_N, dtype=ct.int32)[None, :]
    w = ct.gather(weight, (ct.arange(BLOCK_N, dtype=ct.int32),), check_bounds=not EXACT).astype(ct.float32)[None, :]
    row = ct.gather(x, (offs_m, offs_n), check_bounds=not EXACT)
    if ADD:  # the sum is rounded to its dtype before it is normalised, as in the model
        other = ct.gather(residual, (offs_m, offs_n), check_bounds=not EXACT)
        row = (row.astype(ct.float32) + other.astype(ct.float32)).astype(x.dtype)
        ct.scatter(total, (offs_m, offs_n), row, check_bounds=not EXACT)
    wide = row.astype(ct.float32)
    normed = wide * ct.rsqrt(ct.sum(wide * wide, axis=1, keepdims=True) / x.shape[1] + eps)
    if FP32_WEIGHT:
        result = normed * (offset + w)
    else:  # round to x's dtype before the weight, as the models do
        result = normed.astype(x.dtype).astype(ct.float32) * w
    ct.scatter(y, (offs_m, offs_n), result.astype(y.dtype), check_bounds=not EXACT)


def _rms_norm_long_kernel(
    y, total, x, residual, eps, offset, weight,  # y, total, x, residual: (M, N)   weight: (N,)
    ADD: ct.Constant[bool], FP32_WEIGHT: ct.Constant[bool], BLOCK_N: ct.Constant[int],
):  # fmt: skip
    row = ct.bid(0)
    blocks = ct.cdiv(x.shape[1], BLOCK_N)
    squares = ct.zeros((BLOCK_N,), ct.float32)
    for block in range(blocks):
        offs_n = block * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32)
        wide = _load_sum(x, residual, row, offs_n, ADD)
        squares = squares + wide * wide
    rstd = ct.rsqrt(ct.sum(squares) / x.shape[1] + eps)
    for block in range(blocks):
        offs_n = block * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32)
        wide = _load_sum(x, residual, row, offs_n, ADD)
        if ADD:
            ct.scatter(total, (row, offs_n), wide.astype(total.dtype))
        w = ct.gather(weight, (offs_n,)).astype(ct.float32)
        if FP32_WEIGHT:
            result = wide * rstd * (offset + w)
        else:
            result = (wide * rstd).astype(x.dtype).astype(ct.float32) * w
        ct.scatter(y, (row, offs_n), result.astype(y.dtype))


def _load_sum(x, residual, row, offs_n, ADD):
    """A block of x, or of x + residual rounded to x's dtype, in float32; 0 beyond the row."""
    value = ct.gather(x, (row, offs_n)).astype(ct.float32)
    if ADD:
        value = value + ct.gather(residual, (row, offs_n)).astype(ct.float32)
        value = value.astype(x.dtype).astype(ct.float32)
    return value


def _rms_norm_backward_kernel(
    dx, partial, dy, x, dtotal, eps, offset, weight,  # dx, dy, x, dtotal: (M, N)   partial: (blocks, N)   weight: (N,)
    ADD: ct.Constant[bool], FP32_WEIGHT: ct.Constant[bool], NEED_DWEIGHT: ct.Constant[bool], ROWS: ct.Constant[int],
    BLOCK_N: ct.Constant[int], EXACT: ct.Constant[bool],
):  # fmt: skip
    offs_n = ct.arange(BLOCK_N, dtype=ct.int32)[None, :]
    w = ct.gather(weight, (ct.arange(BLOCK_N, dtype=ct.int32),), check_bounds=not EXACT).astype(ct.float32)[None, :]
    w = w + offset
    dw = ct.zeros((1, BLOCK_N), ct.float32)
    for block in range(ct.bid(0), ct.cdiv(x.shape[0], ROWS), ct.num_blocks(0)):
        at = ((block * ROWS + ct.arange(ROWS, dtype=ct.int32))[:, None], offs_n)
        wide = ct.gather(x, at, check_bounds=not EXACT).astype(ct.float32)
        grad = ct.gather(dy, at, check_bounds=not EXACT).astype(ct.float32)
        rstd = ct.rsqrt(ct.sum(wide * wide, axis=1, keepdims=True) / x.shape[1] + eps)
        normed = wide * rstd
        if NEED_DWEIGHT:
            rounded = normed
            if not FP32_WEIGHT:  # the weight was multiplied with the rounded values
                rounded = normed.astype(x.dtype).astype(ct.float32)
            dw = dw + ct.sum(grad * rounded, axis=0, keepdims=True)
        g = grad * w
        # d(x * rstd)/dx: the part of g along x is taken out
        result = (g - normed * (ct.sum(g * normed, axis=1, keepdims=True) / x.shape[1])) * rstd
        if ADD:
            result = result + ct.gather(dtotal, at, check_bounds=not EXACT).astype(ct.float32)
        ct.scatter(dx, at, result.astype(dx.dtype), check_bounds=not EXACT)
    if NEED_DWEIGHT:
        ct.scatter(partial, (ct.bid(0), offs_n), dw, check_bounds=not EXACT)


def _rms_norm_backward_long_kernel(
    dx, rstds, dy, x, dtotal, eps, offset, weight,  # dx, dy, x, dtotal: (M, N)   rstds: (M,)   weight: (N,)
    ADD: ct.Constant[bool], BLOCK_N: ct.Constant[int],
):  # fmt: skip
    row = ct.bid(0)
    blocks = ct.cdiv(x.shape[1], BLOCK_N)
    squares = ct.zeros((BLOCK_N,), ct.float32)
    products = ct.zeros((BLOCK_N,), ct.float32)
    for block in range(blocks):
        offs_n = block * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32)
        wide = ct.gather(x, (row, offs_n)).astype(ct.float32)
        w = ct.gather(weight, (offs_n,)).astype(ct.float32) + offset
        squares = squares + wide * wide
        products = products + ct.gather(dy, (row, offs_n)).astype(ct.float32) * w * wide
    rstd = ct.rsqrt(ct.sum(squares) / x.shape[1] + eps)
    mean = ct.sum(products) * rstd / x.shape[1]
    ct.scatter(rstds, (row,), rstd)
    for block in range(blocks):
        offs_n = block * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32)
        normed = ct.gather(x, (row, offs_n)).astype(ct.float32) * rstd
        w = ct.gather(weight, (offs_n,)).astype(ct.float32) + offset
        g = ct.gather(dy, (row, offs_n)).astype(ct.float32) * w
        result = (g - normed * mean) * rstd
        if ADD:
            result = result + ct.gather(dtotal, (row, offs_n)).astype(ct.float32)
        ct.scatter(dx, (row, offs_n), result.astype(dx.dtype))


def _dweight_long_kernel(
    dweight, dy, x, rstds,  # dweight: (N,)   dy, x: (M, N)   rstds: (M,)
    FP32_WEIGHT: ct.Constant[bool], BLOCK_M: ct.Constant[int], BLOCK_N: ct.Constant[int],
):  # fmt: skip
    offs_n = (ct.bid(0) * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32))[None, :]
    total = ct.zeros((BLOCK_M, BLOCK_N), ct.float32)
    for block in range(ct.cdiv(x.shape[0], BLOCK_M)):
        offs_m = block * BLOCK_M + ct.arange(BLOCK_M, dtype=ct.int32)
        normed = ct.gather(x, (offs_m[:, None], offs_n)).astype(ct.float32) * ct.gather(rstds, (offs_m,))[:, None]
        if not FP32_WEIGHT:
            normed = normed.astype(x.dtype).astype(ct.float32)
        total = total + ct.gather(dy, (offs_m[:, None], offs_n)).astype(ct.float32) * normed
    ct.scatter(dweight, (offs_n,), ct.sum(total, axis=0, keepdims=True).astype(dweight.dtype))


def _column_sums_kernel(
    total, partial,  # total: (N,)   partial: (P, N)
    BLOCK_P: ct.Constant[int], BLOCK_N: ct.Constant[int],
):  # fmt: skip
    offs_n = (ct.bid(0) * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32))[None, :]
    acc = ct.zeros((BLOCK_P, BLOCK_N), ct.float32)
    for block in range(ct.cdiv(partial.shape[0], BLOCK_P)):
        offs_p = (block * BLOCK_P + ct.arange(BLOCK_P, dtype=ct.int32))[:, None]
        acc = acc + ct.gather(partial, (offs_p, offs_n))
    ct.scatter(total, (offs_n,), ct.sum(acc, axis=0, keepdims=True).astype(total.dtype))


_forward = CutileKernel(_rms_norm_kernel)
_forward_long = CutileKernel(_rms_norm_long_kernel)
_backward = CutileKernel(_rms_norm_backward_kernel)
_backward_long = CutileKernel(_rms_norm_backward_long_kernel)
_dweight_long = CutileKernel(_dweight_long_kernel)
_column_sums = CutileKernel(_column_sums_kernel)


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
    m, n = rows.shape
    add = residual is not None
    other, total = (as_rows(residual), total.view(m, n)) if add else (rows, y.view(m, n))  # unread where not needed
    args = (y.view(m, n), total, rows, other, eps, offset, weight)
    hints = Hints(config.num_warps, config.occupancy or None)
    block = next_power_of_2(n)
    if block > MAX_BLOCK:
        _forward_long((m,), args, (add, fp32_weight, WALK), Hints(num_worker_warps=8))
    else:
        exact = n == block and m % config.rows == 0
        grid = (-(-m // config.rows),)
        _forward(grid, args, (add, fp32_weight, config.rows, block, exact), hints)


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
    m, n = rows.shape
    add = dtotal is not None
    args = (grads, rows, as_rows(dtotal) if add else grads, eps, offset, weight)
    block = next_power_of_2(n)
    if block > MAX_BLOCK_BACKWARD:
        rstds = scratch((m,), torch.float32, x.device)
        _backward_long((m,), (dx.view(m, n), rstds, *args), (add, WALK // 2), Hints(num_worker_warps=8))
        if need_dweight:
            _dweight_long((-(-n // 64),), (dweight, grads, rows, rstds), (fp32_weight, 64, 64), Hints(8))
        return
    blocks = min(-(-m // config.rows), config.waves * device_info(x.device).sm_count)
    partial = scratch((blocks if need_dweight else 1, n), torch.float32, x.device)
    exact = n == block and m % config.rows == 0
    constants = (add, fp32_weight, need_dweight, config.rows, block, exact)
    # Small tiles have registers to spare, and one that needs masks would spill under the bound
    hints = Hints(config.num_warps, config.waves if block > 2048 else None)
    _backward((blocks,), (dx.view(m, n), partial, *args), constants, hints)
    if need_dweight:
        _column_sums((-(-n // 32),), (dweight, partial), (64, 32), Hints(num_worker_warps=4))


@register_impl(
    "rms_norm",
    backend="cutile",
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    supports=no_float64,
)
def launch(
    outs: tuple[Tensor], x: Tensor, weight: Tensor, eps: float, offset: float, fp32_weight: bool, *, config: Config
) -> None:
    run_forward(outs[0], None, x, None, weight, eps, offset, fp32_weight, config)


@register_impl(
    "rms_norm",
    backend="cutile",
    direction="bwd",
    configure=configure_backward,
    config_type=WalkConfig,
    configs=BACKWARD_CONFIGS,
    candidates=candidates_backward,
    supports=no_float64,
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
