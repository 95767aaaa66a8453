"""Casts of 128 rows at a time in Triton: per_block_cast_to_fp8, and per_channel_cast_to_fp8, which shares the kernels.

A program takes 128 rows of a strip of columns, finds the maxima down its columns (and across them, for a block) while
the elements stay in registers, and writes q as it came, or turned.  To turn it, a thread takes four rows and makes one
word of the four bytes of a column; words change hands through shared memory, so that reads and writes are whole lines.
Rows that do not make whole words (R not a multiple of 4) are turned as bytes, more slowly.

A thread holds few columns and many rows: what is done once a column (a reciprocal, the maxima's way through shared
memory) is then done by few threads.  With 16 columns a thread, as Triton would choose for 16-byte stores, a cast by
channels takes twice the instructions.

Traffic: reads x once, writes q and few scales, 3 bytes an element at bf16: 7168x16384 cannot beat 84 us at 4.2 TB/s.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.quant.triton_numbers import (
    as_stored,
    compares_pairs,
    encode,
    encode_four,
    halves,
    inverse,
    inverse_native,
    larger_size,
    largest_size,
    magnitude,
    packed,
    packed_magnitudes,
    scale_of,
    size_amax,
    speaks_ptx,
    unpacked,
)

BLOCK = 128


class Config(NamedTuple):
    columns: int  # of one program: 128 for blocks
    num_warps: int
    vector: int  # neighbouring columns of a thread


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    # 64 elements a thread; H200, 2026-11: 8192x7168 43.4 us (transposed 44.0), 45.9 with a vector of 16
    return Config(BLOCK, num_warps=8, vector=8)


CONFIGS = (Config(BLOCK, num_warps=8, vector=8),)


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """128, 64 or 32 elements a thread."""
    return tuple(Config(BLOCK, warps, vector) for warps in (4, 8, 16) for vector in (4, 8, 16))


@triton.jit
def _factors(
    scales, sizes, strip, row_block, C, scale_r, scale_c,
    DTYPE: tl.constexpr, BLOCKS: tl.constexpr, UE8M0: tl.constexpr, NATIVE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the scales of a strip whose `packed_magnitudes` these are; return the inverse for even and odd columns."""
    PAIRS: tl.constexpr = DTYPE.primitive_bitwidth == 16
    if BLOCKS:
        amax = size_amax(sizes, None, DTYPE, NATIVE)
    else:
        amax = largest_size(sizes, 0, PAIRS, NATIVE)
        if PAIRS:
            low, high = halves(amax, DTYPE)
            amax = magnitude(tl.join(low, high))  # (COLUMNS / 2, 2)
    scale = scale_of(amax, UE8M0)
    if NATIVE:
        factor = inverse_native(scale)
    else:
        factor = inverse(scale)
    line = scales + row_block.to(tl.int64) * scale_r
    if BLOCKS:
        tl.store(line + strip * scale_c, scale)
        even, odd = factor, factor
    else:
        c = strip * COLUMNS + tl.arange(0, COLUMNS)
        tl.store(line + c * scale_c, tl.reshape(scale, (COLUMNS,)), mask=c < C)
        if PAIRS:
            first, second = tl.split(factor)
            even, odd = first[None, :], second[None, :]
        else:
            even, odd = factor[None, :], factor[None, :]
    return even, odd


@triton.jit
def _strip_kernel(
    q, scales, x, R, C, stride_b, stride_x, step, scale_r, scale_c,  # x: (B, R, C)   q: (B, R, C) or (B, C, R)
    BLOCKS: tl.constexpr, TRANSPOSE: tl.constexpr, UE8M0: tl.constexpr, NATIVE: tl.constexpr, FAR: tl.constexpr,
    COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip  # scales: (B, R / 128, C / 128 or C) by its strides
    DTYPE: tl.constexpr = x.dtype.element_ty
    across, down = tl.cdiv(C, COLUMNS), tl.cdiv(R, 128)
    line = tl.program_id(0) // across
    strip, row_block, batch = tl.program_id(0) - line * across, line % down, (line // down).to(tl.int64)
    first_r, first_c = (row_block * 128).to(tl.int64), strip.to(tl.int64) * COLUMNS
    r = tl.arange(0, 128)
    c = tl.max_contiguous(tl.arange(0, COLUMNS), VECTOR)
    mask = (r[:, None] < R - row_block * 128) & (c[None, :] < C - strip * COLUMNS)
    if FAR:
        r, c = r.to(tl.int64), c.to(tl.int64)
    x += batch * stride_b + first_r * stride_x + first_c
    kept = packed(tl.load(x + (r[:, None] * stride_x + c[None, :]), mask=mask, other=0.0))
    even, odd = _factors(
        scales + batch * step, packed_magnitudes(kept), strip, row_block, C, scale_r, scale_c,
        DTYPE, BLOCKS, UE8M0, NATIVE, COLUMNS,
    )  # fmt: skip
    code = encode(unpacked(kept, even, odd, DTYPE), q)
    q += batch * R * C
    if TRANSPOSE:
        q += first_c * R + first_r
        tl.store(q + (c[:, None] * R + r[None, :]), tl.trans(code), mask=tl.trans(mask))
    else:
        q += first_r * C + first_c
        tl.store(q + (r[:, None] * C + c[None, :]), code, mask=mask)


@triton.jit
def _turned_kernel(
    q, scales, x, W, C, stride_b, stride_x, step, scale_r, scale_c,  # x: (B, 4 W, C)   q: (B, C, 4 W)
    BLOCKS: tl.constexpr, UE8M0: tl.constexpr, NATIVE: tl.constexpr, PTX: tl.constexpr, FAR: tl.constexpr,
    COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip  # scales: (B, W / 32, C / 128 or C) by its strides
    DTYPE: tl.constexpr = x.dtype.element_ty
    PAIRS: tl.constexpr = DTYPE.primitive_bitwidth == 16
    across, down = tl.cdiv(C, COLUMNS), tl.cdiv(W, 32)
    line = tl.program_id(0) // across
    strip, row_block, batch = tl.program_id(0) - line * across, line % down, (line // down).to(tl.int64)
    first_w, first_c = (row_block * 32).to(tl.int64), strip.to(tl.int64) * COLUMNS
    w = tl.arange(0, 32)
    c = tl.max_contiguous(tl.arange(0, COLUMNS), VECTOR)
    mask = (w[:, None] < W - row_block * 32) & (c[None, :] < C - strip * COLUMNS)
    if FAR:
        w, c = w.to(tl.int64), c.to(tl.int64)
    at = x + (batch * stride_b + 4 * first_w * stride_x + first_c) + (4 * w[:, None] * stride_x + c[None, :])
    first = packed(tl.load(at, mask=mask, other=0.0))  # (32, COLUMNS): every fourth row
    second = packed(tl.load(at + stride_x, mask=mask, other=0.0))
    third = packed(tl.load(at + 2 * stride_x, mask=mask, other=0.0))
    fourth = packed(tl.load(at + 3 * stride_x, mask=mask, other=0.0))
    upper = larger_size(packed_magnitudes(first), packed_magnitudes(second), PAIRS, NATIVE)
    lower = larger_size(packed_magnitudes(third), packed_magnitudes(fourth), PAIRS, NATIVE)
    even, odd = _factors(
        scales + batch * step, larger_size(upper, lower, PAIRS, NATIVE), strip, row_block, C, scale_r, scale_c,
        DTYPE, BLOCKS, UE8M0, NATIVE, COLUMNS,
    )  # fmt: skip
    words = encode_four(
        unpacked(first, even, odd, DTYPE), unpacked(second, even, odd, DTYPE),
        unpacked(third, even, odd, DTYPE), unpacked(fourth, even, odd, DTYPE), q, PTX,
    )  # fmt: skip
    out = q.to(tl.pointer_type(tl.int32)) + (batch * W * C + first_c * W + first_w)
    tl.store(out + (c[:, None] * W + w[None, :]), tl.trans(words), mask=tl.trans(mask))


_strips = TritonKernel(_strip_kernel)
_turned = TritonKernel(_turned_kernel)


def matrices(x: Tensor) -> Tensor:
    """x (..., R, C) as (B, R, C) with unit stride in the last dimension; a view where possible."""
    batch = x.unsqueeze(0) if x.dim() == 2 else x.flatten(0, -3)
    return batch if batch.stride(-1) == 1 or batch.shape[-1] == 1 else batch.contiguous()


def run(
    q: Tensor, scales: Tensor, x: Tensor, scale_strides: tuple[int, int], blocks: bool, transpose: bool, ue8m0: bool,
    config: Config,
) -> None:  # fmt: skip
    """Cast x (..., R, C); `scale_strides`: of the scales along R and along C."""
    every = matrices(x)
    b, r, c = every.shape
    strides = (every.stride(0), every.stride(1), scales.stride(-3) if x.dim() > 2 else 0, *scale_strides)
    grid = (b * triton.cdiv(r, BLOCK) * triton.cdiv(c, config.columns),)
    # Without vectors every element has an address of its own, and 32 elements a thread fill its registers
    ragged = (c | every.stride(1)) % 16 != 0 or (transpose and r % 4 != 0)
    far = BLOCK * max(r, c, every.stride(1)) >= 1 << 31  # are places within a program's tile beyond 32 bits?
    stored, options = as_stored(q), {"num_warps": config.columns // 8 if ragged else config.num_warps}
    if transpose and r % 4 == 0 and q.data_ptr() % 4 == 0:
        args = (stored, scales, every, r // 4, c, *strides)
        constants = (blocks, ue8m0, compares_pairs(q), speaks_ptx(stored), far, config.columns, config.vector)
        _turned(grid, args, constants, **options)
    else:
        args = (stored, scales, every, r, c, *strides)
        constants = (blocks, transpose, ue8m0, compares_pairs(q), far, config.columns, config.vector)
        _strips(grid, args, constants, **options)


@register_impl(
    "per_block_cast_to_fp8",
    backend="triton",
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
)
def launch(outs: tuple[Tensor, Tensor], x: Tensor, transpose: bool, ue8m0: bool, *, config: Config) -> None:
    q, scales = outs
    along = scales.mT if transpose else scales  # (..., R blocks, C blocks)
    run(q, scales, x, along.stride()[-2:], True, transpose, ue8m0, config)
