"""RMSNorm to e4m3 in Triton, with or without a residual: the rows of `fused_rows.py`, quantised in registers.

Serves rms_norm_fp8 and add_rms_norm_fp8.

A program holds whole rows; 16 lanes hold a group of 128 with 16 bytes of x each, so that the group's maximum takes
three or four shuffles.  Rows too long for registers are read twice; the second read comes from L2.
Many rows that divide into equal parts take the kernel of `rms_norm_fp8_parts.py`.
Traffic: reads x, writes q and 4 bytes a group, 3.03*M*N bytes at bf16: 8192x4096 cannot beat 24 us at 4.2 TB/s.  A norm
and a cast of its result move 7.03*M*N.  With a residual: also reads it and writes the sum, 7.03*M*N and 56 us, where
the three kernels of a model without fusion move 13.03*M*N.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.norm import add_rms_norm_fp8, rms_norm_fp8
from tilewright.ops.norm.add_rms_norm_fp8 import AddRmsNormFp8Args
from tilewright.ops.norm.kernels.triton import row_blocks
from tilewright.ops.norm.kernels.triton.fused_rows import normalise_rows
from tilewright.ops.norm.kernels.triton.long_rows import normalise_block, rstd_of_row
from tilewright.ops.norm.kernels.triton.rms_norm import configure as configure_plain
from tilewright.ops.norm.kernels.triton.rms_norm_fp8_parts import parts as launch_parts
from tilewright.ops.norm.kernels.triton.row_blocks import MAX_BLOCK
from tilewright.ops.norm.rms_norm_fp8 import RmsNormFp8Args
from tilewright.ops.quant.kernels.triton.numbers import (
    as_stored,
    compares_pairs,
    encode,
    inverse,
    inverse_native,
    packed,
    packed_magnitudes,
    scale_of,
    size_amax,
    unpacked,
)
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.rows import RowsBucket, as_rows

GROUP = TOKEN.depth


class Config(NamedTuple):
    rows: int  # rows per program
    num_warps: int
    columns: int = 0  # columns per part, 8 or 16 a thread; 0: the whole row at once


def configure_whole(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    """Configuration of the kernel that holds whole rows."""
    block = min(triton.next_power_of_2(bucket.N), MAX_BLOCK)
    if bucket.M >= 1024 and block >= 2048:
        # Bound by instructions: 14.5 an element on sm_90 with 64 elements a thread, 19 with 16.  H200, 2026-11:
        # 8192x4096 (2, 4) 27.8 us, (1, 8) 30.1; 8192x7168 (1, 8) 51.7, (1, 4) 53.6; 4096x14336 (1, 8) 57.4, (1, 16) 63
        return Config(8192 // block, num_warps=4) if block <= 4096 else Config(rows=1, num_warps=8)
    return Config(*configure_plain(bucket, dtype))


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    n = bucket.N
    if n == 4096 and 1024 <= bucket.M <= 4096 and dtype.itemsize == 2:
        # 4096 rows 15.8 us, in two parts 16.4; 2048 rows 9.9 and 10.3; 8192 rows 28.1 either way (H200, 2026-11)
        return Config(1, num_warps=4)
    if bucket.M >= 1024 and 2048 <= n <= MAX_BLOCK and dtype.itemsize == 2:
        # 16 adjacent elements a thread: half the shuffles and reciprocals an element.  With up to 64 elements a thread
        # the kernel takes 10.3 instructions an element and 80 registers, with up to 128 9.6 and 141: more than 80 KB of
        # loads in flight on an SM
        warps = triton.next_power_of_2(triton.cdiv(n, 2048))
        for num_warps in (warps, warps // 2):
            if num_warps > 0 and n % (512 * num_warps) == 0:
                return Config(1, num_warps, 512 * num_warps)
    return configure_whole(bucket, dtype)


def candidates_whole(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return tuple(Config(*config) for config in row_blocks.candidates(bucket, dtype))


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Configurations of whole rows, and of rows in parts with 16 to 128 elements a thread."""
    n = bucket.N
    parts_configs = (
        Config(1, warps, columns)
        for warps in (1, 2, 4, 8, 16)
        for columns in (256 * warps, 512 * warps)
        if n % columns == 0 and 16 <= n // (32 * warps) <= 128 and dtype.itemsize == 2
    )
    return *candidates_whole(bucket, dtype), *parts_configs


@triton.jit
def _quantise(y_fp32, q, x, UE8M0: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Round y to x's dtype, then quantise it: codes (ROWS, BLOCK_N) and scales (ROWS, groups)."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    GROUPS: tl.constexpr = BLOCK_N // 128
    words = packed(y_fp32.to(DTYPE).reshape(ROWS * GROUPS, 128))
    scale = scale_of(size_amax(packed_magnitudes(words), 1, DTYPE, NATIVE), UE8M0)
    if NATIVE:
        factor = inverse_native(scale)[:, None]
    else:
        factor = inverse(scale)[:, None]
    codes = encode(unpacked(words, factor, factor, DTYPE), q)
    return codes.reshape(ROWS, BLOCK_N), scale.reshape(ROWS, GROUPS)


# A row of q has `units` * UNIT elements, and the compiler does not know whether `units` is even.  So a thread stores as
# many elements as it loads in 16 bytes, and the layout of a row, and the order of its sum, are those of the plain norm.
@triton.jit(do_not_specialize=["units"])
def _rms_norm_fp8_kernel(
    q, scales, total, x, residual, weight,  # q, total, x, residual: (R, N), R = batch * M   scales: (batch, M, groups)
    R, N, M, stride_x, stride_r, units, pitch, step, eps, offset,
    ADD: tl.constexpr, FP32_WEIGHT: tl.constexpr, UE8M0: tl.constexpr, BATCHED: tl.constexpr, NATIVE: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Normalise
    y_fp32, row_offsets, col_offsets, mask = normalise_rows(
        total, x, residual, weight, R, N, stride_x, stride_r, eps, offset, ADD, FP32_WEIGHT, ROWS, BLOCK_N
    )
    # Quantise and store
    codes, scale = _quantise(y_fp32, q, x, UE8M0, NATIVE, ROWS, BLOCK_N)
    tl.store(q + row_offsets * (units * UNIT) + col_offsets[None, :], codes, mask=mask)
    group_idx = tl.arange(0, BLOCK_N // 128)[None, :]
    group_mask = (row_offsets < R) & (group_idx * 128 < N)
    if BATCHED:
        row_offsets = row_offsets // M * step + row_offsets % M
    tl.store(scales + group_idx.to(tl.int64) * pitch + row_offsets, scale, mask=group_mask)


@triton.jit(do_not_specialize=["units"])
def _rms_norm_fp8_long_kernel(
    q, scales, total, x, residual, weight,  # as above
    N, M, stride_x, stride_r, units, pitch, step, eps, offset,
    ADD: tl.constexpr, FP32_WEIGHT: tl.constexpr, UE8M0: tl.constexpr, BATCHED: tl.constexpr, NATIVE: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # First read: rstd
    row_idx = tl.program_id(0).to(tl.int64)
    scale_row = row_idx
    if BATCHED:
        scale_row = row_idx // M * step + row_idx % M
    rstd = rstd_of_row(x, residual, row_idx, N, stride_x, stride_r, eps, ADD, BLOCK_N)
    # Second read: normalise, quantise and store
    for start in range(0, N, BLOCK_N):
        col_offsets = start + tl.arange(0, BLOCK_N)
        y_fp32 = normalise_block(
            total, x, residual, weight, row_idx, rstd, col_offsets, N, stride_x, stride_r, offset, ADD, FP32_WEIGHT
        )
        codes, scale = _quantise(y_fp32, q, x, UE8M0, NATIVE, 1, BLOCK_N)
        tl.store(q + row_idx * (units * UNIT) + col_offsets, codes.reshape(BLOCK_N), mask=col_offsets < N)
        group_idx = start // 128 + tl.arange(0, BLOCK_N // 128)
        scale_offsets = group_idx.to(tl.int64) * pitch + scale_row
        tl.store(scales + scale_offsets, scale.reshape(BLOCK_N // 128), mask=group_idx * 128 < N)


_short = TritonKernel(_rms_norm_fp8_kernel)
_long = TritonKernel(_rms_norm_fp8_long_kernel)


def _launch(
    q: Tensor,
    scales: Tensor,
    total: Tensor | None,
    residual: Tensor | None,
    args: RmsNormFp8Args | AddRmsNormFp8Args,
    config: Config,
) -> None:
    """Normalise and quantise x.  With a residual: normalise and quantise total = x + residual, and write total."""
    x, weight = as_rows(args.x), args.weight.contiguous()
    residual = None if residual is None else as_rows(residual)
    r, n = x.shape
    m, batched = args.x.shape[-2], r > args.x.shape[-2]
    block_n = max(GROUP, triton.next_power_of_2(n))
    unit = 16 // x.element_size() if n % 16 == 0 else 1
    strides = (x.stride(0), 0 if residual is None else residual.stride(0), n // unit)
    scale_strides = (scales.stride(-1), scales.stride(-3) if batched else 0)
    if config.columns and n % config.columns == 0 and residual is None and x.element_size() == 2:
        count = n // config.columns
        parameters = (as_stored(q), scales, x, weight, n, m, x.stride(0), *scale_strides, args.eps, args.offset)
        constants = (args.fp32_weight, args.ue8m0, batched, compares_pairs(q))
        shape = (count, (count - 1).bit_length(), config.columns)
        launch_parts((r,), parameters, (*constants, *shape), num_warps=config.num_warps)
        return
    tensors = (as_stored(q), scales, total, x, residual, weight)
    constants = (residual is not None, args.fp32_weight, args.ue8m0, batched, compares_pairs(q), unit)
    if block_n > MAX_BLOCK:
        parameters = (*tensors, n, m, *strides, *scale_strides, args.eps, args.offset)
        _long((r,), parameters, (*constants, 4096), num_warps=8)
        return
    grid = (triton.cdiv(r, config.rows),)
    parameters = (*tensors, r, n, m, *strides, *scale_strides, args.eps, args.offset)
    _short(grid, parameters, (*constants, config.rows, block_n), num_warps=config.num_warps)


@register_kernel(
    rms_norm_fp8.FORWARD,
    configure=configure,
    config_type=Config,
    configs=row_blocks.every(configure),
    candidates=candidates,
)
def launch(outs: tuple[Tensor, Tensor], args: RmsNormFp8Args, config: Config) -> None:
    q, scales = outs
    _launch(q, scales, None, None, args, config)


@register_kernel(
    add_rms_norm_fp8.FORWARD,
    configure=configure_whole,
    config_type=Config,
    configs=row_blocks.every(configure_whole),
    candidates=candidates_whole,
)
def launch_add(outs: tuple[Tensor, Tensor, Tensor], args: AddRmsNormFp8Args, config: Config) -> None:
    q, scales, total = outs
    _launch(q, scales, total, args.residual, args, config)
