"""RMSNorm in cuTile.  A block holds whole rows in registers: one read of x, one write of y, statistics in between.

Serves rms_norm and add_rms_norm, whose kernel has a second input and output.
Traffic: forward 4*M*N bytes at bf16, so 8192x4096 cannot beat 32 us at 4.2 TB/s; backward reads dy and x and writes dx,
6*M*N, 48 us.  With a residual both move 8*M*N, 64 us.  Rows are read by gather, which becomes plain 16-byte loads: a
tile load of a row becomes TMA boxes of 256 elements, a third of the speed (1.1 TB/s against 3.9 at 32768x4096; H200,
2026-11).  Persistent blocks accumulate the weight gradient; their results are added in a fixed order.  Rows too long
for registers are read twice; the second read comes from L2.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.hardware import device_info
from tilewright.jit.cutile_language import ct
from tilewright.jit.cutile_launch import CutileKernel, Hints
from tilewright.jit.tape import scratch
from tilewright.ops.norm import add_rms_norm, rms_norm
from tilewright.ops.norm.add_rms_norm import AddRmsNormArgs, AddRmsNormBackwardArgs
from tilewright.ops.norm.rms_norm import RmsNormArgs, RmsNormBackwardArgs
from tilewright.ops.rows import PlainRowsBucket, RowsBucket, as_rows, no_float64

MAX_BLOCK = 16384  # 64 float32 a thread at 8 warps, the most there are; longer rows are read in parts
MAX_BLOCK_BACKWARD = 8192  # x, dy, weight and dw are in registers
LONG_BLOCK = 8192  # columns of one part of a long row
HELD = 32768  # elements that the blocks of one SM hold: two registers for each


class Config(NamedTuple):
    rows: int  # rows per block
    num_warps: int  # 4 or 8
    occupancy: int = 0  # blocks per SM; 0: tileiras chooses


class PersistentConfig(NamedTuple):
    """Persistent blocks: each loops over tiles of rows and leaves one partial weight gradient."""

    rows: int  # rows per tile
    num_warps: int  # 4 or 8
    ctas_per_sm: int  # blocks per SM


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def configure(bucket: RowsBucket | PlainRowsBucket, dtype: torch.dtype) -> Config:
    block = min(next_power_of_2(bucket.N), MAX_BLOCK)
    return Config(rows=max(1, min(8, 2048 // block)), num_warps=8 if block > 4096 else 4)


CONFIGS = tuple(dict.fromkeys(configure(RowsBucket(1, 1 << k), torch.bfloat16) for k in range(15)))


def candidates(bucket: RowsBucket | PlainRowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Configurations with 4 to 64 elements a thread."""
    block = min(next_power_of_2(bucket.N), MAX_BLOCK)
    return tuple(
        Config(rows, warps, occupancy)
        for warps in (4, 8)
        for rows in (1, 2, 4, 8, 16)
        for occupancy in (0, 4, 8)
        if rows == 1 or (rows <= bucket.M and 4 * 32 * warps <= rows * block)
        if rows * block <= 64 * 32 * warps and rows * block * max(1, occupancy) <= HELD
    )


def configure_backward(bucket: RowsBucket | PlainRowsBucket, dtype: torch.dtype) -> PersistentConfig:
    block = next_power_of_2(bucket.N)
    if block <= 2048:
        return PersistentConfig(rows=max(1, min(8, 2048 // block)), num_warps=4, ctas_per_sm=4)
    # two float32 blocks an SM spill on sm_100 and sm_120
    return PersistentConfig(rows=1, num_warps=8, ctas_per_sm=2 if block <= 4096 and dtype.itemsize == 2 else 1)


BACKWARD_CONFIGS = tuple(dict.fromkeys(configure_backward(RowsBucket(1, 1 << k), torch.bfloat16) for k in range(15)))


def candidates_backward(bucket: RowsBucket | PlainRowsBucket, dtype: torch.dtype) -> tuple[PersistentConfig, ...]:
    """Configurations with 4 to 32 elements of x and of dy a thread."""
    block = next_power_of_2(bucket.N)
    if block > MAX_BLOCK_BACKWARD:
        return ()
    return tuple(
        PersistentConfig(rows, warps, ctas_per_sm)
        for warps in (4, 8)
        for rows in (1, 2, 4, 8)
        for ctas_per_sm in (1, 2, 3, 4, 6)
        if rows == 1 or 4 * 32 * warps <= rows * block
        if rows * block <= 32 * 32 * warps
        and (rows + 1) * block * ctas_per_sm <= 3 * HELD // 4  # weights are two more rows
    )


def _rms_norm_kernel(
    y, total, x, residual, eps, offset, weight,  # y, total, x, residual: (M, N)   weight: (N,)
    ADD: ct.Constant[bool], FP32_WEIGHT: ct.Constant[bool], ROWS: ct.Constant[int], BLOCK_N: ct.Constant[int],
    EXACT: ct.Constant[bool],
):  # fmt: skip  # EXACT: nothing needs a mask
    """y = x_hat * (offset + weight), x_hat = x * rstd.   ADD: normalise total = x + residual, and write it."""
    # Load the weight and the rows
    row_idx = (ct.bid(0) * ROWS + ct.arange(ROWS, dtype=ct.int32))[:, None]
    col_offsets = ct.arange(BLOCK_N, dtype=ct.int32)[None, :]
    w = ct.gather(weight, (ct.arange(BLOCK_N, dtype=ct.int32),), check_bounds=not EXACT).astype(ct.float32)[None, :]
    row = ct.gather(x, (row_idx, col_offsets), check_bounds=not EXACT)
    if ADD:  # the sum is rounded to its dtype before it is normalised, as in the model
        r = ct.gather(residual, (row_idx, col_offsets), check_bounds=not EXACT)
        row = (row.astype(ct.float32) + r.astype(ct.float32)).astype(x.dtype)
        ct.scatter(total, (row_idx, col_offsets), row, check_bounds=not EXACT)
    # Normalise
    x_fp32 = row.astype(ct.float32)
    x_hat = x_fp32 * ct.rsqrt(ct.sum(x_fp32 * x_fp32, axis=1, keepdims=True) / x.shape[1] + eps)
    # Scale by the weight
    if FP32_WEIGHT:
        y_fp32 = x_hat * (offset + w)
    else:  # round to x's dtype before the weight, as the models do
        y_fp32 = x_hat.astype(x.dtype).astype(ct.float32) * w
    ct.scatter(y, (row_idx, col_offsets), y_fp32.astype(y.dtype), check_bounds=not EXACT)


def _rms_norm_long_kernel(
    y, total, x, residual, eps, offset, weight,  # y, total, x, residual: (M, N)   weight: (N,)
    ADD: ct.Constant[bool], FP32_WEIGHT: ct.Constant[bool], BLOCK_N: ct.Constant[int],
):  # fmt: skip
    # First read: rstd
    row_idx = ct.bid(0)
    blocks = ct.cdiv(x.shape[1], BLOCK_N)
    sum_squares = ct.zeros((BLOCK_N,), ct.float32)
    for block in range(blocks):
        col_offsets = block * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32)
        x_fp32 = _load_fp32(x, residual, row_idx, col_offsets, ADD)
        sum_squares = sum_squares + x_fp32 * x_fp32
    rstd = ct.rsqrt(ct.sum(sum_squares) / x.shape[1] + eps)
    # Second read: y
    for block in range(blocks):
        col_offsets = block * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32)
        x_fp32 = _load_fp32(x, residual, row_idx, col_offsets, ADD)
        if ADD:
            ct.scatter(total, (row_idx, col_offsets), x_fp32.astype(total.dtype))
        w = ct.gather(weight, (col_offsets,)).astype(ct.float32)
        if FP32_WEIGHT:
            y_fp32 = x_fp32 * rstd * (offset + w)
        else:
            y_fp32 = (x_fp32 * rstd).astype(x.dtype).astype(ct.float32) * w
        ct.scatter(y, (row_idx, col_offsets), y_fp32.astype(y.dtype))


def _load_fp32(x, residual, row_idx, col_offsets, ADD):
    """A block of x, or of x + residual rounded to x's dtype, in float32; 0 beyond the row."""
    x_fp32 = ct.gather(x, (row_idx, col_offsets)).astype(ct.float32)
    if ADD:
        x_fp32 = x_fp32 + ct.gather(residual, (row_idx, col_offsets)).astype(ct.float32)
        x_fp32 = x_fp32.astype(x.dtype).astype(ct.float32)
    return x_fp32


def _rms_norm_backward_kernel(
    dx, dw_partial, dy, x, dtotal, eps, offset, weight,  # dx, dy, x, dtotal: (M, N)  dw_partial: (blocks, N)
    ADD: ct.Constant[bool], FP32_WEIGHT: ct.Constant[bool], NEED_DWEIGHT: ct.Constant[bool], ROWS: ct.Constant[int],
    BLOCK_N: ct.Constant[int], EXACT: ct.Constant[bool],
):  # fmt: skip
    """With w = offset + weight and wdy = w * dy:   dx = rstd * (wdy - x_hat * (1 / N) * dot(wdy, x_hat))   [+ dtotal]

    and, summed over the rows, dw = sum(dy * x_hat), x_hat rounded to x's dtype unless FP32_WEIGHT.
    """
    # Load the weight
    col_offsets = ct.arange(BLOCK_N, dtype=ct.int32)[None, :]
    w = ct.gather(weight, (ct.arange(BLOCK_N, dtype=ct.int32),), check_bounds=not EXACT).astype(ct.float32)[None, :]
    w = w + offset
    dw = ct.zeros((1, BLOCK_N), ct.float32)
    for block in range(ct.bid(0), ct.cdiv(x.shape[0], ROWS), ct.num_blocks(0)):
        # Load a tile of rows of x and dy
        index = ((block * ROWS + ct.arange(ROWS, dtype=ct.int32))[:, None], col_offsets)
        x_fp32 = ct.gather(x, index, check_bounds=not EXACT).astype(ct.float32)
        dy_fp32 = ct.gather(dy, index, check_bounds=not EXACT).astype(ct.float32)
        # Recompute rstd
        rstd = ct.rsqrt(ct.sum(x_fp32 * x_fp32, axis=1, keepdims=True) / x.shape[1] + eps)
        x_hat = x_fp32 * rstd
        # Accumulate dw
        if NEED_DWEIGHT:
            x_hat_rounded = x_hat
            if not FP32_WEIGHT:  # the weight was multiplied with the rounded values
                x_hat_rounded = x_hat.astype(x.dtype).astype(ct.float32)
            dw = dw + ct.sum(dy_fp32 * x_hat_rounded, axis=0, keepdims=True)
        # Compute and store dx
        wdy = dy_fp32 * w
        dx_fp32 = (wdy - x_hat * (ct.sum(wdy * x_hat, axis=1, keepdims=True) / x.shape[1])) * rstd
        if ADD:
            dx_fp32 = dx_fp32 + ct.gather(dtotal, index, check_bounds=not EXACT).astype(ct.float32)
        ct.scatter(dx, index, dx_fp32.astype(dx.dtype), check_bounds=not EXACT)
    # Store this block's partial dw
    if NEED_DWEIGHT:
        ct.scatter(dw_partial, (ct.bid(0), col_offsets), dw, check_bounds=not EXACT)


def _rms_norm_backward_long_kernel(
    dx, rstds, dy, x, dtotal, eps, offset, weight,  # dx, dy, x, dtotal: (M, N)   rstds: (M,)   weight: (N,)
    ADD: ct.Constant[bool], BLOCK_N: ct.Constant[int],
):  # fmt: skip
    """dx = rstd * (wdy - x_hat * (1 / N) * dot(wdy, x_hat))   [+ dtotal if ADD], one row a block; writes rstd too."""
    # First read: rstd and dot(wdy, x_hat)
    row_idx = ct.bid(0)
    blocks = ct.cdiv(x.shape[1], BLOCK_N)
    sum_squares = ct.zeros((BLOCK_N,), ct.float32)
    sum_wdy_x = ct.zeros((BLOCK_N,), ct.float32)
    for block in range(blocks):
        col_offsets = block * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32)
        x_fp32 = ct.gather(x, (row_idx, col_offsets)).astype(ct.float32)
        w = ct.gather(weight, (col_offsets,)).astype(ct.float32) + offset
        sum_squares = sum_squares + x_fp32 * x_fp32
        sum_wdy_x = sum_wdy_x + ct.gather(dy, (row_idx, col_offsets)).astype(ct.float32) * w * x_fp32
    rstd = ct.rsqrt(ct.sum(sum_squares) / x.shape[1] + eps)
    mean_wdy_x_hat = ct.sum(sum_wdy_x) * rstd / x.shape[1]
    ct.scatter(rstds, (row_idx,), rstd)
    # Second read: dx
    for block in range(blocks):
        col_offsets = block * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32)
        x_hat = ct.gather(x, (row_idx, col_offsets)).astype(ct.float32) * rstd
        w = ct.gather(weight, (col_offsets,)).astype(ct.float32) + offset
        wdy = ct.gather(dy, (row_idx, col_offsets)).astype(ct.float32) * w
        dx_fp32 = (wdy - x_hat * mean_wdy_x_hat) * rstd
        if ADD:
            dx_fp32 = dx_fp32 + ct.gather(dtotal, (row_idx, col_offsets)).astype(ct.float32)
        ct.scatter(dx, (row_idx, col_offsets), dx_fp32.astype(dx.dtype))


def _dweight_long_kernel(
    dweight, dy, x, rstds,  # dweight: (N,)   dy, x: (M, N)   rstds: (M,)
    FP32_WEIGHT: ct.Constant[bool], BLOCK_M: ct.Constant[int], BLOCK_N: ct.Constant[int],
):  # fmt: skip
    """dw = sum(dy * x_hat) over the rows, x_hat rounded to x's dtype unless FP32_WEIGHT.  BLOCK_N columns a block."""
    col_offsets = (ct.bid(0) * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32))[None, :]
    acc = ct.zeros((BLOCK_M, BLOCK_N), ct.float32)
    for block in range(ct.cdiv(x.shape[0], BLOCK_M)):
        row_idx = block * BLOCK_M + ct.arange(BLOCK_M, dtype=ct.int32)
        x_hat = ct.gather(x, (row_idx[:, None], col_offsets)).astype(ct.float32) * ct.gather(rstds, (row_idx,))[:, None]
        if not FP32_WEIGHT:
            x_hat = x_hat.astype(x.dtype).astype(ct.float32)
        acc = acc + ct.gather(dy, (row_idx[:, None], col_offsets)).astype(ct.float32) * x_hat
    ct.scatter(dweight, (col_offsets,), ct.sum(acc, axis=0, keepdims=True).astype(dweight.dtype))


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


def _launch(
    y: Tensor, total: Tensor | None, residual: Tensor | None, args: RmsNormArgs | AddRmsNormArgs, config: Config
) -> None:
    """Normalise x into y.  With a residual: normalise total = x + residual, and write total."""
    x, weight = as_rows(args.x), args.weight.contiguous()
    m, n = x.shape
    add = residual is not None
    # A kernel without ADD uses neither residual nor total: any tensor will do
    residual, total = (as_rows(residual), total.view(m, n)) if add else (x, y.view(m, n))
    parameters = (y.view(m, n), total, x, residual, args.eps, args.offset, weight)
    block_n = next_power_of_2(n)
    if block_n > MAX_BLOCK:
        _forward_long((m,), parameters, (add, args.fp32_weight, LONG_BLOCK), Hints(num_worker_warps=8))
        return
    exact = n == block_n and m % config.rows == 0
    constants = (add, args.fp32_weight, config.rows, block_n, exact)
    _forward((-(-m // config.rows),), parameters, constants, Hints(config.num_warps, config.occupancy or None))


def _launch_backward(
    outs: tuple[Tensor, Tensor],
    x: Tensor,
    dtotal: Tensor | None,
    args: RmsNormBackwardArgs | AddRmsNormBackwardArgs,
    config: PersistentConfig,
) -> None:
    """Write dx, and dweight if needed.  `dtotal`, the gradient of the returned sum itself, is added to dx."""
    dx, dweight = outs
    dy, x, weight = as_rows(args.dy), as_rows(x), args.weight.contiguous()
    m, n = x.shape
    dx = dx.view(m, n)
    add = dtotal is not None
    inputs = (dy, x, as_rows(dtotal) if add else dy, args.eps, args.offset, weight)
    block_n = next_power_of_2(n)
    if block_n > MAX_BLOCK_BACKWARD:
        rstds = scratch((m,), torch.float32, x.device)
        _backward_long((m,), (dx, rstds, *inputs), (add, LONG_BLOCK // 2), Hints(num_worker_warps=8))
        if args.need_dweight:
            _dweight_long((-(-n // 64),), (dweight, dy, x, rstds), (args.fp32_weight, 64, 64), Hints(8))
        return
    num_blocks = min(-(-m // config.rows), config.ctas_per_sm * device_info(x.device).sm_count)
    dw_partial = scratch((num_blocks if args.need_dweight else 1, n), torch.float32, x.device)
    exact = n == block_n and m % config.rows == 0
    constants = (add, args.fp32_weight, args.need_dweight, config.rows, block_n, exact)
    # Only large tiles get a bound: small ones have registers to spare, and a masked one would spill under it
    hints = Hints(config.num_warps, config.ctas_per_sm if block_n > 2048 else None)
    _backward((num_blocks,), (dx, dw_partial, *inputs), constants, hints)
    if args.need_dweight:
        _column_sums((-(-n // 32),), (dweight, dw_partial), (64, 32), Hints(num_worker_warps=4))


Args = RmsNormArgs | RmsNormBackwardArgs | AddRmsNormArgs | AddRmsNormBackwardArgs


def why_not(args: Args) -> str | None:
    return "needs a weight" if args.weight is None else no_float64(*args)


@register_kernel(
    rms_norm.FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=why_not,
)
def launch(outs: tuple[Tensor], args: RmsNormArgs, config: Config) -> None:
    (y,) = outs
    _launch(y, None, None, args, config)


@register_kernel(
    rms_norm.BACKWARD,
    configure=configure_backward,
    config_type=PersistentConfig,
    configs=BACKWARD_CONFIGS,
    candidates=candidates_backward,
    why_not=why_not,
)
def launch_backward(outs: tuple[Tensor, Tensor], args: RmsNormBackwardArgs, config: PersistentConfig) -> None:
    _launch_backward(outs, args.x, None, args, config)


@register_kernel(
    add_rms_norm.FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=why_not,
)
def launch_add(outs: tuple[Tensor, Tensor], args: AddRmsNormArgs, config: Config) -> None:
    y, total = outs
    _launch(y, total, args.residual, args, config)


@register_kernel(
    add_rms_norm.BACKWARD,
    configure=configure_backward,
    config_type=PersistentConfig,
    configs=BACKWARD_CONFIGS,
    candidates=candidates_backward,
    why_not=why_not,
)
def launch_add_backward(outs: tuple[Tensor, Tensor], args: AddRmsNormBackwardArgs, config: PersistentConfig) -> None:
    _launch_backward(outs, args.total, args.dtotal, args, config)
