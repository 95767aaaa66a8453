"""quantize_weight in Triton: a program quantizes one group of several rows, in registers.

Traffic: 2 N K bytes read of a bf16 weight, N K (N K / 2 at 4 bits) and the scales written; 28672 x 4096 to 8 bits, 354
MB, cannot take less than 82 us at 4.3 TB/s.  amax compares magnitudes as integers, which have the order of
the numbers with NaN on top; adding 1.5 * 2^23 rounds to an integer, ties to even.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.exponential import ROUND
from tilewright.ops.quant.kernels.triton.numbers import (
    compares_pairs,
    packed,
    packed_magnitudes,
    size_amax,
    unpacked,
    unpacked_halves,
)
from tilewright.ops.rows import no_float64
from tilewright.ops.weight_only import packing
from tilewright.ops.weight_only.quantize_weight import FORWARD, QuantizeWeightArgs, QuantizeWeightBucket

AMAX_MIN = tl.constexpr(packing.AMAX_MIN)
INVERSE_8, INVERSE_4 = tl.constexpr(packing.INVERSE[8]), tl.constexpr(packing.INVERSE[4])
INFINITY = tl.constexpr(0x7F800000)


class Config(NamedTuple):
    """block_n: rows of a program."""

    block_n: int
    num_warps: int


CONFIGS = (Config(16, 4), Config(32, 4), Config(64, 8))


def configure(bucket: QuantizeWeightBucket, dtype: torch.dtype) -> Config:
    """Chooses rows so that scales fill a sector, and a thread writes 16 bytes: 16 elements of 8 bits, 32 of 4.

    H200, 2026-11, 28672x4096: int8 82.6 us with 16 rows, 83.4 with 32; int4 84.5 and 74.0.
    """
    return Config(16, 4) if bucket.bits == 8 else Config(32, 4)


def candidates(bucket: QuantizeWeightBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return CONFIGS


@triton.jit
def _quantize_kernel(
    q, scales, w, N, K, stride_s, stride_wn, stride_wk,  # q: (N, K) or (N, K / 2)  scales: (groups, N)  w: (N, K)
    BITS: tl.constexpr, NATIVE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes scale = amax / 127 (or 7) of each group of 128, and q = round(w / scale)."""
    GROUP: tl.constexpr = 128
    INVERSE: tl.constexpr = INVERSE_8 if BITS == 8 else INVERSE_4
    DTYPE: tl.constexpr = w.dtype.element_ty

    # Load one group of each row
    group = tl.program_id(0)
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = group * GROUP + tl.arange(0, GROUP)
    mask = (offs_n < N)[:, None] & (offs_k < K)[None, :]
    w_ptrs = w + offs_n[:, None] * stride_wn + offs_k[None, :].to(tl.int64) * stride_wk
    w_tile = packed(tl.load(w_ptrs, mask=mask, other=0.0))  # (BLOCK_N, GROUP), or half as many words of two

    # Compute the scales
    amax_bits = size_amax(packed_magnitudes(w_tile), 1, DTYPE, NATIVE)
    amax = amax_bits.to(tl.float32, bitcast=True)
    scale = tl.where(amax < AMAX_MIN, 0.0, amax * INVERSE).to(scales.dtype.element_ty)
    tl.store(scales + group.to(tl.int64) * stride_s + offs_n, scale, mask=offs_n < N)
    rounded_scale = scale.to(tl.float32)
    inverse = tl.where(rounded_scale == 0.0, 0.0, tl.div_rn(1.0, tl.where(rounded_scale == 0.0, 1.0, rounded_scale)))
    # Elements become 0 where the scale is infinite or NaN
    w_tile = tl.where((amax_bits < INFINITY)[:, None], w_tile, 0)
    inverse = tl.where(amax_bits < INFINITY, inverse, 0.0)[:, None]

    # Round and store: the low bits of 1.5 * 2^23 + n are n in two's complement
    if BITS == 8:
        scaled = unpacked(w_tile, inverse, inverse, DTYPE) + ROUND
        integers = scaled.to(tl.int32, bitcast=True)
        tl.store(q + offs_n[:, None] * K + offs_k[None, :], integers.to(tl.int8), mask=mask)
    else:
        low, high = unpacked_halves(w_tile, inverse, DTYPE)
        low, high = (low + ROUND).to(tl.int32, bitcast=True), (high + ROUND).to(tl.int32, bitcast=True)
        offs_b = group * (GROUP // 2) + tl.arange(0, GROUP // 2)
        mask_b = (offs_n < N)[:, None] & (offs_b < K // 2)[None, :]
        packed_bytes = (low & 15) | ((high & 15) << 4)
        tl.store(q + offs_n[:, None] * (K // 2) + offs_b[None, :], packed_bytes.to(tl.uint8), mask=mask_b)


# No FMA: the reference rounds the product, then the sum.  With FMA one element in a thousand differs
_kernel = TritonKernel(_quantize_kernel, enable_fp_fusion=False)


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS[:2],
    candidates=candidates,
    why_not=lambda args: no_float64(*args),
)
def launch(outs: tuple[Tensor, Tensor], args: QuantizeWeightArgs, config: Config) -> None:
    q, scales = outs
    n, k = args.w.shape
    grid = (packing.groups(k), triton.cdiv(n, config.block_n))
    values = (q, scales, args.w, n, k, scales.stride(1), *args.w.stride())
    _kernel(grid, values, (args.bits, compares_pairs(q), config.block_n), num_warps=config.num_warps)
