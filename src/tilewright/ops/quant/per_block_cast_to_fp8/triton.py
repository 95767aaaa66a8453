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
from tilewright.ops.quant.triton_numbers import as_stored, encode, encode_four, inverse, magnitude, scale_of, speaks_ptx

BLOCK = 128


class Config(NamedTuple):
    columns: int  # of one program: 128 for blocks
    num_warps: int
    vector: int  # neighbouring columns of a thread


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    return Config(BLOCK, num_warps=16, vector=4 if bucket[2] else 16)


CONFIGS = tuple(configure((1, 1, transpose), torch.bfloat16) for transpose in (0, 1))


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """128, 64 or 32 elements a thread."""
    return tuple(Config(BLOCK, warps, vector) for warps in (4, 8, 16) for vector in (4, 8, 16))


@triton.jit
def _strip_kernel(
    q, scales, x, R, C, stride_b, stride_x, step, scale_r, scale_c,  # x: (B, R, C)   q: (B, R, C) or (B, C, R)
    BLOCKS: tl.constexpr, TRANSPOSE: tl.constexpr, UE8M0: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip  # scales: (B, R / 128, C / 128 or C) by its strides
    across, down = tl.cdiv(C, COLUMNS), tl.cdiv(R, 128)
    strip, row_block = tl.program_id(0) % across, tl.program_id(0) // across % down
    batch = (tl.program_id(0) // (across * down)).to(tl.int64)
    r = row_block * 128 + tl.arange(0, 128)
    c = tl.max_contiguous(strip * COLUMNS + tl.arange(0, COLUMNS), VECTOR)
    mask = (r[:, None] < R) & (c[None, :] < C)
    at = batch * stride_b + r.to(tl.int64)[:, None] * stride_x + c[None, :]
    wide = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    scales += batch * step + row_block.to(tl.int64) * scale_r
    if BLOCKS:
        scale = scale_of(tl.max(magnitude(wide)), UE8M0)
        tl.store(scales + strip * scale_c, scale)
        factor = inverse(scale)
    else:
        scale = scale_of(tl.max(magnitude(wide), 0), UE8M0)  # (COLUMNS,)
        tl.store(scales + c * scale_c, scale, mask=c < C)
        factor = inverse(scale)[None, :]
    code = encode(wide * factor, q)
    q += batch * R * C
    if TRANSPOSE:
        tl.store(q + c.to(tl.int64)[:, None] * R + r[None, :], tl.trans(code), mask=tl.trans(mask))
    else:
        tl.store(q + r.to(tl.int64)[:, None] * C + c[None, :], code, mask=mask)


@triton.jit
def _turned_kernel(
    q, scales, x, W, C, stride_b, stride_x, step, scale_r, scale_c,  # x: (B, 4 W, C)   q: (B, C, 4 W)
    BLOCKS: tl.constexpr, UE8M0: tl.constexpr, PTX: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip  # scales: (B, W / 32, C / 128 or C) by its strides
    across, down = tl.cdiv(C, COLUMNS), tl.cdiv(W, 32)
    strip, row_block = tl.program_id(0) % across, tl.program_id(0) // across % down
    batch = (tl.program_id(0) // (across * down)).to(tl.int64)
    w = row_block * 32 + tl.arange(0, 32)
    c = tl.max_contiguous(strip * COLUMNS + tl.arange(0, COLUMNS), VECTOR)
    mask = (w[:, None] < W) & (c[None, :] < C)
    at = x + batch * stride_b + (4 * w).to(tl.int64)[:, None] * stride_x + c[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)  # (32, COLUMNS): every fourth row
    second = tl.load(at + stride_x, mask=mask, other=0.0).to(tl.float32)
    third = tl.load(at + 2 * stride_x, mask=mask, other=0.0).to(tl.float32)
    fourth = tl.load(at + 3 * stride_x, mask=mask, other=0.0).to(tl.float32)
    pairs = tl.maximum(magnitude(first), magnitude(second)), tl.maximum(magnitude(third), magnitude(fourth))
    size = tl.maximum(pairs[0], pairs[1])
    scales += batch * step + row_block.to(tl.int64) * scale_r
    if BLOCKS:
        scale = scale_of(tl.max(size), UE8M0)
        tl.store(scales + strip * scale_c, scale)
        factor = inverse(scale)
    else:
        scale = scale_of(tl.max(size, 0), UE8M0)  # (COLUMNS,)
        tl.store(scales + c * scale_c, scale, mask=c < C)
        factor = inverse(scale)[None, :]
    words = encode_four(first * factor, second * factor, third * factor, fourth * factor, q, PTX)
    line = (q + batch * W * 4 * C).to(tl.pointer_type(tl.int32))
    tl.store(line + c.to(tl.int64)[:, None] * W + w[None, :], tl.trans(words), mask=tl.trans(mask))


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
    # Without vectors every element has an address of its own, which takes the registers of half of the elements
    ragged = (c | every.stride(1)) % 16 != 0 or (transpose and r % 4 != 0)
    stored, options = as_stored(q), {"num_warps": 16 if ragged else config.num_warps}
    if transpose and r % 4 == 0 and q.data_ptr() % 4 == 0:
        args = (stored, scales, every, r // 4, c, *strides)
        _turned(grid, args, (blocks, ue8m0, speaks_ptx(stored), config.columns, config.vector), **options)
    else:
        args = (stored, scales, every, r, c, *strides)
        _strips(grid, args, (blocks, transpose, ue8m0, config.columns, config.vector), **options)


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
