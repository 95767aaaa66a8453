"""Casts of 128 rows at a time in Triton: per_block_cast_to_fp8 and per_channel_cast_to_fp8.

A program takes 128 rows of a strip of columns, reduces the maxima along the columns (for a block also across them)
while the elements stay in registers, and writes q plain or transposed.  To transpose it, a thread takes four rows and
packs the four bytes of a column into one word; threads exchange words through shared memory, so that loads and stores
cover whole cache lines.  If R is not a multiple of 4 the bytes are transposed one by one, which is slower.

A thread holds few columns and many rows, so that few threads do the work of a column: a reciprocal, and the maximum's
exchange through shared memory.  With 16 columns a thread, as Triton would choose for 16-byte stores, a cast by channels
takes twice the instructions.

Traffic: reads x once, writes q and the scales, at bf16 3 bytes an element with a scale a block: 7168x16384 cannot beat
84 us at 4.2 TB/s; 3.03 with a scale for 128 elements of a column: 8192x7168 cannot beat 42 us.
"""

from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.quant.casts import StripCastArgs
from tilewright.ops.quant.kernels.triton.numbers import (
    as_stored,
    compares_pairs,
    encode,
    encode_four,
    halves,
    has_ptx_e4m3,
    inverse,
    inverse_native,
    larger_size,
    largest_size,
    magnitude,
    packed,
    packed_magnitudes,
    scale_of,
    size_amax,
    unpacked,
)
from tilewright.ops.quant.per_block_cast_to_fp8 import FORWARD as BLOCKS
from tilewright.ops.quant.per_block_cast_to_fp8 import PerBlockCastBucket
from tilewright.ops.quant.per_channel_cast_to_fp8 import FORWARD as CHANNELS
from tilewright.ops.quant.per_channel_cast_to_fp8 import PerChannelCastBucket

BLOCK = 128


class Config(NamedTuple):
    columns: int  # columns per program; 128 for blocks
    num_warps: int
    vector: int  # adjacent columns per thread


BLOCK_CONFIG = Config(BLOCK, num_warps=8, vector=8)
"""64 elements a thread; H200, 2026-11: 8192x7168 43.4 us (transposed 44.0), 45.9 with a vector of 16."""
CHANNEL_CONFIG = Config(64, num_warps=4, vector=8)
"""64 columns are 128 bytes of bf16; eight programs of four warps fill the registers of an SM."""


def block_candidates(bucket: PerBlockCastBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Configurations with 128, 64 or 32 elements a thread."""
    return tuple(Config(BLOCK, warps, vector) for warps in (4, 8, 16) for vector in (4, 8, 16))


def channel_candidates(bucket: PerChannelCastBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Configurations with 32 to 128 elements a thread."""
    space = product((64, 128), (2, 4, 8, 16), (4, 8))
    return tuple(Config(c, warps, vector) for c, warps, vector in space if 1024 <= c * BLOCK // warps <= 4096)


@triton.jit
def _factors(
    scales, magnitudes, strip, row_block, C, scale_r, scale_c,
    DTYPE: tl.constexpr, BLOCKS: tl.constexpr, UE8M0: tl.constexpr, NATIVE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the scales of a strip with these `packed_magnitudes`; return their inverses for even and odd columns."""
    PAIRS: tl.constexpr = DTYPE.primitive_bitwidth == 16
    if BLOCKS:
        amax = size_amax(magnitudes, None, DTYPE, NATIVE)
    else:
        amax = largest_size(magnitudes, 0, PAIRS, NATIVE)
        if PAIRS:
            low, high = halves(amax, DTYPE)
            amax = magnitude(tl.join(low, high))  # (COLUMNS / 2, 2)
    scale = scale_of(amax, UE8M0)
    if NATIVE:
        factor = inverse_native(scale)
    else:
        factor = inverse(scale)
    scale_row = scales + row_block.to(tl.int64) * scale_r
    if BLOCKS:
        tl.store(scale_row + strip * scale_c, scale)
        even, odd = factor, factor
    else:
        col_idx = strip * COLUMNS + tl.arange(0, COLUMNS)
        tl.store(scale_row + col_idx * scale_c, tl.reshape(scale, (COLUMNS,)), mask=col_idx < C)
        if PAIRS:
            first, second = tl.split(factor)
            even, odd = first[None, :], second[None, :]
        else:
            even, odd = factor[None, :], factor[None, :]
    return even, odd


@triton.jit
def _strip_kernel(
    q, scales, x, R, C, stride_b, stride_x, step, scale_r, scale_c,  # x: (B, R, C)   q: (B, R, C) or (B, C, R)
    BLOCKS: tl.constexpr, TRANSPOSE: tl.constexpr, UE8M0: tl.constexpr, NATIVE: tl.constexpr, INT64: tl.constexpr,
    COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip  # scales: (B, R / 128, C / 128 or C) by its strides
    # Load a strip
    DTYPE: tl.constexpr = x.dtype.element_ty
    num_strips, num_row_blocks = tl.cdiv(C, COLUMNS), tl.cdiv(R, 128)
    strip_row = tl.program_id(0) // num_strips
    strip, row_block = tl.program_id(0) - strip_row * num_strips, strip_row % num_row_blocks
    batch = (strip_row // num_row_blocks).to(tl.int64)
    first_r, first_c = (row_block * 128).to(tl.int64), strip.to(tl.int64) * COLUMNS
    row_offsets = tl.arange(0, 128)
    col_offsets = tl.max_contiguous(tl.arange(0, COLUMNS), VECTOR)
    mask = (row_offsets[:, None] < R - row_block * 128) & (col_offsets[None, :] < C - strip * COLUMNS)
    if INT64:
        row_offsets, col_offsets = row_offsets.to(tl.int64), col_offsets.to(tl.int64)
    x += batch * stride_b + first_r * stride_x + first_c
    words = packed(tl.load(x + (row_offsets[:, None] * stride_x + col_offsets[None, :]), mask=mask, other=0.0))
    # Compute and store the scales
    even, odd = _factors(
        scales + batch * step, packed_magnitudes(words), strip, row_block, C, scale_r, scale_c,
        DTYPE, BLOCKS, UE8M0, NATIVE, COLUMNS,
    )  # fmt: skip
    # Quantise and store
    codes = encode(unpacked(words, even, odd, DTYPE), q)
    q += batch * R * C
    if TRANSPOSE:
        q += first_c * R + first_r
        tl.store(q + (col_offsets[:, None] * R + row_offsets[None, :]), tl.trans(codes), mask=tl.trans(mask))
    else:
        q += first_r * C + first_c
        tl.store(q + (row_offsets[:, None] * C + col_offsets[None, :]), codes, mask=mask)


@triton.jit
def _transpose_kernel(
    q, scales, x, W, C, stride_b, stride_x, step, scale_r, scale_c,  # x: (B, 4 W, C)   q: (B, C, 4 W)
    BLOCKS: tl.constexpr, UE8M0: tl.constexpr, NATIVE: tl.constexpr, PTX: tl.constexpr, INT64: tl.constexpr,
    COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip  # scales: (B, W / 32, C / 128 or C) by its strides
    DTYPE: tl.constexpr = x.dtype.element_ty
    PAIRS: tl.constexpr = DTYPE.primitive_bitwidth == 16
    # Load four rows of each word
    num_strips, num_row_blocks = tl.cdiv(C, COLUMNS), tl.cdiv(W, 32)
    strip_row = tl.program_id(0) // num_strips
    strip, row_block = tl.program_id(0) - strip_row * num_strips, strip_row % num_row_blocks
    batch = (strip_row // num_row_blocks).to(tl.int64)
    first_w, first_c = (row_block * 32).to(tl.int64), strip.to(tl.int64) * COLUMNS
    word_offsets = tl.arange(0, 32)
    col_offsets = tl.max_contiguous(tl.arange(0, COLUMNS), VECTOR)
    mask = (word_offsets[:, None] < W - row_block * 32) & (col_offsets[None, :] < C - strip * COLUMNS)
    if INT64:
        word_offsets, col_offsets = word_offsets.to(tl.int64), col_offsets.to(tl.int64)
    x += batch * stride_b + 4 * first_w * stride_x + first_c
    x_ptrs = x + (4 * word_offsets[:, None] * stride_x + col_offsets[None, :])
    first = packed(tl.load(x_ptrs, mask=mask, other=0.0))  # (32, COLUMNS): every fourth row
    second = packed(tl.load(x_ptrs + stride_x, mask=mask, other=0.0))
    third = packed(tl.load(x_ptrs + 2 * stride_x, mask=mask, other=0.0))
    fourth = packed(tl.load(x_ptrs + 3 * stride_x, mask=mask, other=0.0))
    # Compute and store the scales
    max_first_two = larger_size(packed_magnitudes(first), packed_magnitudes(second), PAIRS, NATIVE)
    max_last_two = larger_size(packed_magnitudes(third), packed_magnitudes(fourth), PAIRS, NATIVE)
    scales += batch * step
    magnitudes = larger_size(max_first_two, max_last_two, PAIRS, NATIVE)
    even, odd = _factors(
        scales, magnitudes, strip, row_block, C, scale_r, scale_c,
        DTYPE, BLOCKS, UE8M0, NATIVE, COLUMNS,
    )  # fmt: skip
    # Quantise, pack and store
    words = encode_four(
        unpacked(first, even, odd, DTYPE), unpacked(second, even, odd, DTYPE),
        unpacked(third, even, odd, DTYPE), unpacked(fourth, even, odd, DTYPE), q, PTX,
    )  # fmt: skip
    out = q.to(tl.pointer_type(tl.int32)) + (batch * W * C + first_c * W + first_w)
    tl.store(out + (col_offsets[:, None] * W + word_offsets[None, :]), tl.trans(words), mask=tl.trans(mask))


_strips = TritonKernel(_strip_kernel)
_transpose = TritonKernel(_transpose_kernel)


def _matrices(x: Tensor) -> Tensor:
    """x (..., R, C) as (B, R, C) with unit stride in the last dimension; a view where possible."""
    batch = x.unsqueeze(0) if x.dim() == 2 else x.flatten(0, -3)
    return batch if batch.stride(-1) == 1 or batch.shape[-1] == 1 else batch.contiguous()


@register_kernel(
    BLOCKS,
    configure=lambda bucket, dtype: BLOCK_CONFIG,
    config_type=Config,
    configs=(BLOCK_CONFIG,),
    candidates=block_candidates,
)
def launch_blocks(outs: tuple[Tensor, Tensor], args: StripCastArgs, config: Config) -> None:
    _launch(outs, args, True, config)


@register_kernel(
    CHANNELS,
    configure=lambda bucket, dtype: CHANNEL_CONFIG,
    config_type=Config,
    configs=(CHANNEL_CONFIG,),
    candidates=channel_candidates,
)
def launch_channels(outs: tuple[Tensor, Tensor], args: StripCastArgs, config: Config) -> None:
    _launch(outs, args, False, config)


def _launch(outs: tuple[Tensor, Tensor], args: StripCastArgs, blocks: bool, config: Config) -> None:
    """Cast x (..., R, C) with a scale for 128 x 128 elements (blocks), or for 128 elements of a column."""
    (q, scales), transpose = outs, args.transpose
    x = _matrices(args.x)
    b, r, c = x.shape
    row_scales = scales.mT if transpose else scales  # (..., R blocks, C blocks or C)
    scale_step = scales.stride(-3) if args.x.dim() > 2 else 0
    strides = (x.stride(0), x.stride(1), scale_step, *row_scales.stride()[-2:])
    grid = (b * triton.cdiv(r, BLOCK) * triton.cdiv(c, config.columns),)
    # Unaligned rows have no vector accesses: every element has its own address, and 32 elements fill a thread
    unaligned = (c | x.stride(1)) % 16 != 0 or (transpose and r % 4 != 0)
    int64 = BLOCK * max(r, c, x.stride(1)) >= 1 << 31  # offsets in a tile exceed 32 bits
    q_stored, pairs = as_stored(q), compares_pairs(q)
    options = {"num_warps": config.columns // 8 if unaligned else config.num_warps}
    if transpose and r % 4 == 0 and q.data_ptr() % 4 == 0:
        values = (q_stored, scales, x, r // 4, c, *strides)
        constants = (blocks, args.ue8m0, pairs, has_ptx_e4m3(q_stored), int64, config.columns, config.vector)
        _transpose(grid, values, constants, **options)
    else:
        values = (q_stored, scales, x, r, c, *strides)
        constants = (blocks, transpose, args.ue8m0, pairs, int64, config.columns, config.vector)
        _strips(grid, values, constants, **options)
