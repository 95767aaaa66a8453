"""The casts of rows in Triton: per_token_cast_to_fp8.

group=128   A program takes groups of 128 from adjacent rows, one group a half warp: the maximum takes a few shuffles
            while the elements stay in registers.  The scales of one column of groups are adjacent, so that a program
            writes runs of scales in the layout that the GEMM reads.
group=None  A program holds whole rows in registers; longer rows are read twice, the second time from L2.

Traffic: reads x once, writes q and 4 bytes a group, 3.03 bytes an element at bf16: 8192x7168 cannot beat 42 us at 4.2
TB/s.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.quant.kernels.triton.numbers import as_stored, encode, exponent, inverse, magnitude, scale_of
from tilewright.ops.quant.per_token_cast_to_fp8 import FORWARD, PerTokenCastArgs, PerTokenCastBucket
from tilewright.ops.rows import as_rows
from tilewright.ops.unaligned_rows import unit_of

MAX_BLOCK = 16384  # elements of a row held in registers; longer rows are read twice
GROUP = 128
ROWS = 16  # rows per program: their scales are 64 adjacent bytes
SMALL = 1 << 22  # elements; smaller problems get small programs, so that every SM has some


class Config(NamedTuple):
    rows: int  # rows per program
    groups: int  # groups per row of a program; 0: whole rows
    num_warps: int


def configure(bucket: PerTokenCastBucket, dtype: torch.dtype) -> Config:
    m, k, group = bucket
    if group:
        rows = min(m, ROWS)
        groups = 4 if m * k >= SMALL else max(1, 16 // rows)
        return Config(rows, groups, num_warps=max(1, min(8, rows * groups // 8)))
    block = min(triton.next_power_of_2(k), MAX_BLOCK)
    if block <= 512:
        return Config(min(8, 2048 // block), 0, num_warps=4)
    return Config(1, 0, num_warps=min(16, max(4, block // 512)))


CONFIGS = tuple(
    dict.fromkeys(
        configure(PerTokenCastBucket(1 << m, 1 << k, group), torch.bfloat16)
        for m in range(15)
        for k in range(15)
        for group in (128, 0)
    )
)


def candidates(bucket: PerTokenCastBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Configurations with 8 to 64 elements a thread."""
    m, k, group = bucket
    warps = (1, 2, 4, 8, 16)
    if group:
        sizes = (
            (r, g, 128 * r * g)
            for r in (1, 4, 8, 16, 32)
            for g in (1, 2, 4, 8)
            if r <= m and (g == 1 or 128 * g < 2 * k)
        )
        return tuple(Config(r, g, w) for r, g, size in sizes for w in warps if 8 <= size // (32 * w) <= 64)
    block = triton.next_power_of_2(k)
    if block > MAX_BLOCK:
        return ()
    rows = (r for r in (1, 2, 4, 8) if r <= m)
    return tuple(Config(r, 0, w) for r in rows for w in (*warps, 32) if 8 <= r * block // (32 * w) <= 64)


@triton.jit
def _group_kernel(
    q, scales, x, R, units, M, unit_stride_x, pitch, step,  # scales: (batch, M, groups)
    UE8M0: tl.constexpr, PACKED: tl.constexpr, BATCHED: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip  # q, x: (R, K), R = batch * M, K = units * UNIT
    K, stride_x = units * UNIT, unit_stride_x * UNIT
    # Load the groups
    blocks_a_row = tl.cdiv(K, 128 * GROUPS)
    first_row = tl.program_id(0) // blocks_a_row * ROWS
    first_group = tl.program_id(0) % blocks_a_row * GROUPS
    index = tl.arange(0, ROWS * GROUPS)  # row index fastest: adjacent scales
    row_idx = first_row + index % ROWS
    group_idx = first_group + index // ROWS
    offs_k = group_idx[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = (row_idx[:, None] < R) & (offs_k < K)
    row_offsets = row_idx.to(tl.int64)[:, None]
    x_fp32 = tl.load(x + row_offsets * stride_x + offs_k, mask=mask, other=0.0).to(tl.float32)  # (ROWS * GROUPS, 128)
    # Quantise and store
    scale = scale_of(tl.max(magnitude(x_fp32), 1), UE8M0)
    tl.store(q + row_offsets * K + offs_k, encode(x_fp32 * inverse(scale)[:, None], q), mask=mask)
    # Store the scales
    if PACKED:
        shifted = tl.where(group_idx * 128 < K, exponent(scale) << (group_idx % 4 * 8), 0)
        stored = tl.sum(tl.reshape(shifted, (GROUPS // 4, 4, ROWS)), 1)  # the bits do not overlap: the sum is an or
        scale_row = (first_row + tl.arange(0, ROWS))[None, :]
        scale_line = (first_group // 4 + tl.arange(0, GROUPS // 4))[:, None]
        scale_mask = (scale_row < R) & (scale_line * 512 < K)
    else:
        stored, scale_row, scale_line, scale_mask = scale, row_idx, group_idx, (row_idx < R) & (group_idx * 128 < K)
    if BATCHED:
        scale_row = scale_row // M * step + scale_row % M
    tl.store(scales + scale_line.to(tl.int64) * pitch + scale_row, stored, mask=scale_mask)


@triton.jit
def _row_kernel(
    q, scales, x, R, units, unit_stride_x,  # q, x: (R, K), K = units * UNIT   scales: (R,)
    UE8M0: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    K, stride_x = units * UNIT, unit_stride_x * UNIT
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    row_idx = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_offsets = row_idx.to(tl.int64)[:, None]
    mask = (row_idx[:, None] < R) & (offs_k < K)
    x_fp32 = tl.load(x + row_offsets * stride_x + offs_k, mask=mask, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(magnitude(x_fp32), 1), UE8M0)
    tl.store(q + row_offsets * K + offs_k, encode(x_fp32 * inverse(scale)[:, None], q), mask=mask)
    tl.store(scales + row_idx, scale, mask=row_idx < R)


@triton.jit
def _long_row_kernel(
    q, scales, x, units, unit_stride_x,  # q, x: (R, K), K = units * UNIT   scales: (R,)
    UE8M0: tl.constexpr, UNIT: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    K, stride_x = units * UNIT, unit_stride_x * UNIT
    row_idx = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_K)
    # First read: amax
    amax = tl.zeros((BLOCK_K,), tl.int32)
    for start in range(0, K, BLOCK_K):
        x_block = tl.load(x + row_idx * stride_x + start + offs, mask=start + offs < K, other=0.0)
        amax = tl.maximum(amax, magnitude(x_block))
    scale = scale_of(tl.max(amax, 0), UE8M0)
    factor = inverse(scale)
    # Second read: quantise and store
    for start in range(0, K, BLOCK_K):
        mask = start + offs < K
        x_block = tl.load(x + row_idx * stride_x + start + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(q + row_idx * K + start + offs, encode(x_block * factor, q), mask=mask)
    tl.store(scales + row_idx, scale)


_groups = TritonKernel(_group_kernel)
_rows = TritonKernel(_row_kernel)
_long_rows = TritonKernel(_long_row_kernel)


@register_kernel(FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates)
def launch(outs: tuple[Tensor, Tensor], args: PerTokenCastArgs, config: Config) -> None:
    x_rows = as_rows(args.x)
    if args.group:
        _launch_groups(outs, x_rows, args, config)
    else:
        _launch_rows(outs, x_rows, args.ue8m0, config)


def _launch_rows(outs: tuple[Tensor, Tensor], x_rows: Tensor, ue8m0: bool, config: Config) -> None:
    q, scales = as_stored(outs[0]), outs[1]
    (r, k), stride = x_rows.shape, x_rows.stride(0)
    unit = unit_of(x_rows.itemsize, k, stride)
    block_k, units, unit_stride = triton.next_power_of_2(k), k // unit, stride // unit
    if block_k <= MAX_BLOCK:
        values, constants = (q, scales, x_rows, r, units, unit_stride), (ue8m0, unit, config.rows, block_k)
        _rows((triton.cdiv(r, config.rows),), values, constants, num_warps=config.num_warps)
    else:
        _long_rows((r,), (q, scales, x_rows, units, unit_stride), (ue8m0, unit, 4096), num_warps=8)


def _launch_groups(outs: tuple[Tensor, Tensor], x_rows: Tensor, args: PerTokenCastArgs, config: Config) -> None:
    q, scales = as_stored(outs[0]), outs[1]
    (r, k), m = x_rows.shape, args.x.shape[-2]
    batched = r > m
    groups, warps = config.groups, config.num_warps
    if args.packed and groups < 4:  # a program writes whole words
        groups, warps = 4, min(16, warps * 4 // groups)
    grid = (triton.cdiv(r, config.rows) * triton.cdiv(k, GROUP * groups),)
    pitch, step = scales.stride(-1), scales.stride(-3) if batched else 0
    unit = unit_of(x_rows.itemsize, k, x_rows.stride(0))
    values = (q, scales, x_rows, r, k // unit, m, x_rows.stride(0) // unit, pitch, step)
    _groups(grid, values, (args.ue8m0, args.packed, batched, unit, config.rows, groups), num_warps=warps)
