"""weight_only_matmul in Triton: the portable form, for any strides, alignment and sizes, on NVIDIA and AMD.

The loop takes one group of 128 along K at a time: it converts the integers to x's dtype in registers, exactly,
multiplies from zero, and adds the float32 result to the accumulator with the group's scales.  At 4 bits a byte holds an
even and an odd element of K; x is split the same way, and two products of 64 replace one of 128, without interleaving.

Few rows make few tiles, so K is split: each part writes float32 sums, and a second launch adds them in a fixed order.

Sizes are run-time values.  The compiled variant depends on the layout alone: rows that can be read as vectors, columns
that can be written as vectors, or neither.

Traffic: the weight as stored, N K (1 + 2 / 128) bytes at 8 bits and bf16 scales; 28672 x 4096 of 4 bits, 60.6 MB,
cannot take less than 14 us at 4.3 TB/s.
"""

from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.gemm.kernels.triton.dense_kernel import _epilogue, reduce_kernel
from tilewright.ops.rows import no_float64
from tilewright.ops.weight_only import packing
from tilewright.ops.weight_only.weight_only_matmul import FORWARD, WeightOnlyMatmulArgs, WeightOnlyMatmulBucket

FILL = 128  # programs that keep a large GPU busy; the configuration may not depend on the GPU at hand
REDUCE_M, REDUCE_N = 4, 256  # tile of a program of the reduction


class Config(NamedTuple):
    """block_m: rows of x, block_n: channels of a tile.   splits: parts of K, 1 for none.

    swapped: channels are the rows of the matrix instruction, as on Hopper, where it takes them from registers.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int
    swapped: bool


FEW_ROWS, MORE_ROWS = Config(16, 32, 4, 3, 1, False), Config(64, 32, 4, 3, 1, False)
SMALL = 1 << 20  # bytes of a weight


def is_small(n: int, k: int, bits: int) -> bool:
    """Returns whether reading the weight takes less time than a launch."""
    return n * k * bits <= 8 * SMALL


def configure(bucket: WeightOnlyMatmulBucket, dtype: torch.dtype) -> Config:
    """Chooses tiles of 64 channels, or 32 where rows or masks need the registers.  Splits K of whole groups until FILL
    programs have a tile, with four groups a part at least.

    Three stages fit the 64 KB of an AMD compute unit, whose compiler pipelines no deeper; an H200's table may say more.
    Unaligned or small operands are bound by neither tiles nor masks: two configs serve them all.
    """
    m, n, k = bucket.M, bucket.N, bucket.K
    if not bucket.aligned or is_small(n, k, bucket.bits):
        return FEW_ROWS if m <= FEW_ROWS.block_m else MORE_ROWS
    rows = 16 if m <= 16 else 32 if m <= 32 else 64
    whole_groups = k % packing.GROUP == 0
    block_n = 64 if rows < 64 and whole_groups and n >= 64 else 32
    tiles, splits = -(-n // block_n), 1
    may_split = whole_groups and m <= 64 and n >= block_n  # a second launch is for products that fill a tile
    while may_split and splits < 8 and splits * tiles < FILL and packing.groups(k) >= 8 * splits:
        splits *= 2
    return Config(rows, block_n, 4, 3, splits, False)


_SIZES = product((1, 32, 64), (256, 1024, 2048, 4096, 8192), (128, 1024, 2048, 8192), (0, 1))
CONFIGS = tuple(
    dict.fromkeys(
        configure(WeightOnlyMatmulBucket(m, n, k, bits=8, aligned=aligned, out_bits=16, gated=0), torch.bfloat16)
        for m, n, k, aligned in _SIZES
    )
)


def candidates(bucket: WeightOnlyMatmulBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns both orientations, pipelines deeper than some GPUs have room for, all splits with two groups a part."""
    m, k = bucket.M, bucket.K
    rows = 16 if m <= 16 else 32 if m <= 32 else 64
    return tuple(
        Config(rows, block_n, 4, stages, splits, swapped)
        for block_n in (64, 128)
        for stages in (3, 4, 6)
        for splits in (1, 2, 4, 8)
        for swapped in (False, True)
        if splits == 1 or packing.groups(k) >= 2 * splits
    )


@triton.jit
def _weight_only_kernel(
    y, x, q, scales, bias,  # y: (M, N_out) or (splits, M, N)  x: (M, K)  q: (N, K) or (N, K / 2)  scales: (N, groups)
    M, N, K, splits, stride_y, stride_x, stride_sn, stride_sg,
    BITS: tl.constexpr, ACT: tl.constexpr, SPLIT: tl.constexpr, EVEN_K: tl.constexpr, SWAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes y = act(x @ (q * scales)^T + bias); with SPLIT one float32 product for each part of K."""
    GROUP: tl.constexpr = 128
    PER_BYTE: tl.constexpr = 8 // BITS
    WIDTH: tl.constexpr = GROUP // PER_BYTE

    # Find the tile, and its part of K
    tiles_m = tl.cdiv(M, BLOCK_M)
    row = tl.program_id(0) % tiles_m * BLOCK_M
    col = tl.program_id(0) // tiles_m * BLOCK_N
    split = tl.program_id(1)
    groups = tl.cdiv(K, GROUP)
    group_begin = 0
    group_end = groups
    if SPLIT:
        group_begin = groups * split // splits
        group_end = groups * (split + 1) // splits
    offs_m = row + tl.arange(0, BLOCK_M)
    # Channels beyond the last are never stored: re-reading the last one saves a predicate for each byte
    offs_n = tl.minimum(col + tl.arange(0, BLOCK_N), N - 1)
    offs_k = tl.arange(0, GROUP)
    offs_b = tl.arange(0, WIDTH)
    x_ptrs = x + offs_m.to(tl.int64)[:, None] * stride_x + offs_k[None, :]
    q_ptrs = q + offs_n.to(tl.int64)[:, None] * (K // PER_BYTE) + offs_b[None, :]
    scale_ptrs = scales + offs_n.to(tl.int64) * stride_sn

    if SWAPPED:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(group_begin, group_end):
        # Load one group of weights, rows and scales
        mask_x = (offs_m < M)[:, None]
        if EVEN_K:
            q_tile = tl.load(q_ptrs + group * WIDTH)  # (BLOCK_N, WIDTH)
        else:
            mask_x = mask_x & (offs_k < K - group * GROUP)[None, :]
            q_tile = tl.load(q_ptrs + group * WIDTH, mask=(offs_b < K // PER_BYTE - group * WIDTH)[None, :], other=0)
        x_tile = tl.load(x_ptrs + group * GROUP, mask=mask_x, other=0.0)  # (BLOCK_M, GROUP)
        scale = tl.load(scale_ptrs + group * stride_sg).to(tl.float32)

        # Convert the integers, and multiply
        if BITS == 8:
            acc_tmp = _dot_acc(x_tile, q_tile.to(x.dtype.element_ty), None, SWAPPED)
        else:
            packed = q_tile.to(tl.int8, bitcast=True)
            even, odd = tl.split(tl.reshape(x_tile, (BLOCK_M, WIDTH, 2)))
            acc_tmp = _dot_acc(even, ((packed << 4) >> 4).to(x.dtype.element_ty), None, SWAPPED)
            acc_tmp = _dot_acc(odd, (packed >> 4).to(x.dtype.element_ty), acc_tmp, SWAPPED)

        # Promote with scales
        if SWAPPED:
            acc += acc_tmp * scale[:, None]
        else:
            acc += acc_tmp * scale[None, :]
    if SWAPPED:
        acc = acc.T

    # Epilogue
    GATED: tl.constexpr = 2 if ACT == "swiglu" else 1
    value = _epilogue(
        acc,
        1.0,
        bias,
        None,
        split,
        row,
        col,
        M,
        N,
        N // GATED,
        1,
        0,
        0,
        0,
        1,
        ACT,
        y.dtype.element_ty == tl.float32,
        False,
    ).to(y.dtype.element_ty)  # (BLOCK_M, BLOCK_N / GATED)
    offs_out = col // GATED + tl.arange(0, BLOCK_N // GATED)
    y_ptrs = y + (split.to(tl.int64) * M + offs_m)[:, None] * stride_y + offs_out[None, :]
    tl.store(y_ptrs, value, mask=(offs_m < M)[:, None] & (offs_out < N // GATED)[None, :])


@triton.jit
def _dot_acc(rows, weights, acc, SWAPPED: tl.constexpr):  # rows (BLOCK_M, K), weights (BLOCK_N, K); acc None: from zero
    if SWAPPED:
        acc = tl.dot(weights, rows.T, acc)
    else:
        acc = tl.dot(rows, weights.T, acc)
    return acc


def _specialized(*except_for: str) -> TritonKernel:
    """The kernel with its sizes and strides specialized on multiples of 16, except for M, splits and these."""
    return TritonKernel(triton.jit(_weight_only_kernel.fn, do_not_specialize=("M", "splits", *except_for)))


_TUNED = TritonKernel(_weight_only_kernel)  # also specialized on M: otherwise 32 rows of 8 bits spill on Hopper
_VECTORS = _specialized()  # every other size and stride is a multiple of 16
_READ_VECTORS = _specialized("N", "stride_y", "stride_sg")  # K and the rows of x are multiples of 16
_SCALARS = _specialized("N", "K", "stride_y", "stride_x", "stride_sg")
_reduce = TritonKernel(reduce_kernel)


def _kernel_for(small: bool, k: int, stride_x: int, *others: int) -> TritonKernel:
    """Chooses the variant by the layout: what can be read and written as vectors."""
    if k % 16 or stride_x % 16:
        return _SCALARS
    if any(size % 16 for size in others):
        return _READ_VECTORS
    return _VECTORS if small else _TUNED


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=lambda args: no_float64(args.scales, args.bias),
)
def launch(outs: tuple[Tensor], args: WeightOnlyMatmulArgs, config: Config) -> None:
    (y,) = outs
    x, q, scales = args.x, args.q, args.scales
    (m, k), n, bits = x.shape, q.shape[0], packing.bits_of(q)
    splits = min(config.splits, packing.groups(k))
    out = y if splits == 1 else scratch((splits, m, n), torch.float32, y.device)
    bias, activation = (args.bias, args.activation) if splits == 1 else (None, "")
    grid = (triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n), splits)
    values = (out, x, q, scales, bias, m, n, k, splits, out.shape[-1], x.stride(0), *scales.stride())
    even = k % packing.GROUP == 0 and not is_small(n, k, bits)
    constants = (bits, activation, splits > 1, even, config.swapped, config.block_m, config.block_n)
    multiply = _kernel_for(is_small(n, k, bits), k, x.stride(0), n, out.shape[-1], scales.stride(1))
    multiply(grid, values, constants, num_warps=config.num_warps, num_stages=config.num_stages)
    if splits > 1:
        grid = (triton.cdiv(m, REDUCE_M) * triton.cdiv(n, REDUCE_N),)
        values = (y, out, args.bias, None, None, 1.0, 1, m, n, splits, 0, y.shape[1], 1, 0, 0, 0)
        _reduce(grid, values, (args.activation, False, REDUCE_M, REDUCE_N), num_warps=4)
