"""The cast of rows to int8 in Triton: a program holds whole rows in registers; longer rows are read twice.

Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits.  amax compares magnitudes as
integers, which have the order of the numbers with NaN on top.

Traffic: reads x once, writes q and 4 bytes a row, 3 bytes an element at bf16: 8192x4096 cannot beat 24 us at 4.2 TB/s.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.exponential import ROUND
from tilewright.ops.quant import int8
from tilewright.ops.quant.kernels.triton.numbers import INFINITY, inverse, magnitude
from tilewright.ops.quant.per_token_cast_to_int8 import FORWARD, PerTokenCastInt8Args, PerTokenCastInt8Bucket
from tilewright.ops.rows import as_rows
from tilewright.ops.unaligned_rows import unit_of

MAX_BLOCK = 16384  # elements of a row held in registers; longer rows are read twice
LONG_BLOCK = 4096  # elements of a longer row that are read at once
AMAX_MIN = tl.constexpr(int(torch.tensor(int8.AMAX_MIN).view(torch.int32)))  # as a magnitude
INVERSE_MAX = tl.constexpr(int8.INVERSE_MAX)


class Config(NamedTuple):
    rows: int  # rows per program
    num_warps: int


def configure(bucket: PerTokenCastInt8Bucket, dtype: torch.dtype) -> Config:
    """Chooses 16 elements a thread, or 32 of the longest rows, as `per_token_cast.py` does for whole rows."""
    block = min(triton.next_power_of_2(bucket.K), MAX_BLOCK)
    if block <= 512:
        return Config(min(8, 2048 // block), 4)
    return Config(1, min(16, max(4, block // 512)))


CONFIGS = tuple(dict.fromkeys(configure(PerTokenCastInt8Bucket(1, 1 << k, 0), torch.bfloat16) for k in range(15)))


def candidates(bucket: PerTokenCastInt8Bucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns configurations with 8 to 64 elements a thread."""
    block = triton.next_power_of_2(bucket.K)
    if block > MAX_BLOCK:
        return ()
    rows = (r for r in (1, 2, 4, 8) if r <= bucket.M)
    return tuple(Config(r, w) for r in rows for w in (1, 2, 4, 8, 16, 32) if 8 <= r * block // (32 * w) <= 64)


@triton.jit
def _load(x, smooth, offs, offs_k, mask, mask_k):  # elements at `offs`, divided -> float32
    x_fp32 = tl.load(x + offs, mask=mask, other=0.0).to(tl.float32)
    if smooth is not None:
        divisors = tl.load(smooth + offs_k, mask=mask_k, other=1.0).to(tl.float32)
        x_fp32 = tl.div_rn(x_fp32, tl.broadcast_to(divisors, x_fp32.shape))
    return x_fp32


@triton.jit
def _scale_of(amax):  # a largest magnitude -> scale, and the factor of elements, 0 where amax is not finite
    scale = tl.maximum(amax, AMAX_MIN).to(tl.float32, bitcast=True) * INVERSE_MAX
    return scale, tl.where(amax < INFINITY, inverse(scale), 0.0)


@triton.jit
def _quantised(x_fp32, amax, factor):  # elements of rows with these maxima -> int8
    scaled = tl.where(amax < INFINITY, x_fp32, 0.0) * factor + ROUND
    return scaled.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _row_kernel(
    q, scales, x, smooth, R, units, unit_stride_x,  # q, x: (R, K), K = units * UNIT   scales: (R,)   smooth: (K,)
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    K, stride_x = units * UNIT, unit_stride_x * UNIT
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    row_idx = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_offsets = row_idx.to(tl.int64)[:, None]
    mask = (row_idx[:, None] < R) & (offs_k < K)
    x_fp32 = _load(x, smooth, row_offsets * stride_x + offs_k, offs_k, mask, offs_k < K)  # (ROWS, BLOCK_K)
    amax = tl.max(magnitude(x_fp32), 1)
    scale, factor = _scale_of(amax)
    tl.store(q + row_offsets * K + offs_k, _quantised(x_fp32, amax[:, None], factor[:, None]), mask=mask)
    tl.store(scales + row_idx, scale, mask=row_idx < R)


@triton.jit
def _long_row_kernel(
    q, scales, x, smooth, units, unit_stride_x,  # q, x: (R, K), K = units * UNIT   scales: (R,)   smooth: (K,)
    UNIT: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    K, stride_x = units * UNIT, unit_stride_x * UNIT
    row_idx = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_K)
    # First read: amax
    largest = tl.zeros((BLOCK_K,), tl.int32)
    for start in range(0, K, BLOCK_K):
        offs_k = start + offs
        largest = tl.maximum(
            largest, magnitude(_load(x, smooth, row_idx * stride_x + offs_k, offs_k, offs_k < K, offs_k < K))
        )
    amax = tl.max(largest, 0)
    scale, factor = _scale_of(amax)
    # Second read: quantise and store
    for start in range(0, K, BLOCK_K):
        offs_k = start + offs
        x_fp32 = _load(x, smooth, row_idx * stride_x + offs_k, offs_k, offs_k < K, offs_k < K)
        tl.store(q + row_idx * K + offs_k, _quantised(x_fp32, amax, factor), mask=offs_k < K)
    tl.store(scales + row_idx, scale)


# No FMA: the reference rounds the product, then the sum.  With FMA one element in a thousand differs
_rows = TritonKernel(_row_kernel, enable_fp_fusion=False)
_long_rows = TritonKernel(_long_row_kernel, enable_fp_fusion=False)


@register_kernel(FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates)
def launch(outs: tuple[Tensor, Tensor], args: PerTokenCastInt8Args, config: Config) -> None:
    (q, scales), x_rows = outs, as_rows(args.x)
    (r, k), stride = x_rows.shape, x_rows.stride(0)
    unit = unit_of(x_rows.itemsize, k, stride)
    block_k, units, unit_stride = triton.next_power_of_2(k), k // unit, stride // unit
    if block_k <= MAX_BLOCK:
        values, constants = (q, scales, x_rows, args.smooth, r, units, unit_stride), (unit, config.rows, block_k)
        _rows((triton.cdiv(r, config.rows),), values, constants, num_warps=config.num_warps)
    else:
        _long_rows((r,), (q, scales, x_rows, args.smooth, units, unit_stride), (unit, LONG_BLOCK), num_warps=8)
