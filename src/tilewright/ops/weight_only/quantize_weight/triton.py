"""quantize_weight in Triton: a program takes a group of several rows through registers once.

Traffic: 2 N K bytes read of a bf16 weight, N K (N K / 2 at 4 bits) and the scales written; 28672 x 4096 to 8 bits, 354
MB, cannot take less than 82 us at 4.3 TB/s.  The largest magnitude is found among magnitudes as integers, which order
as the numbers do with NaN on top; rounding to an integer is an addition of 1.5 * 2^23, exact to ties to even.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.exponential import ROUND
from tilewright.ops.quant.triton_numbers import (
    compares_pairs,
    packed,
    packed_magnitudes,
    size_amax,
    unpacked,
    unpacked_halves,
)
from tilewright.ops.rows import no_float64
from tilewright.ops.weight_only import packing

AMAX_MIN = tl.constexpr(packing.AMAX_MIN)
INVERSE_8, INVERSE_4 = tl.constexpr(packing.INVERSE[8]), tl.constexpr(packing.INVERSE[4])
INFINITY = tl.constexpr(0x7F800000)


class Config(NamedTuple):
    """block_n: rows of a program."""

    block_n: int
    num_warps: int


CONFIGS = (Config(16, 4), Config(32, 4), Config(64, 8))


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """Scales fill a sector, and a thread writes 16 bytes: 16 elements of 8 bits, 32 of 4.

    H200, 2026-11, 28672x4096: int8 82.6 us with 16 rows, 83.4 with 32; int4 84.5 and 74.0.
    """
    return Config(16, 4) if bucket[2] == 8 else Config(32, 4)


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    return CONFIGS


@triton.jit
def _quantize_kernel(
    q, scales, w, N, K, stride_s, stride_wn, stride_wk,  # q: (N, K) or (N, K / 2)  scales: (groups, N)  w: (N, K)
    BITS: tl.constexpr, NATIVE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = 128
    INVERSE: tl.constexpr = INVERSE_8 if BITS == 8 else INVERSE_4
    DTYPE: tl.constexpr = w.dtype.element_ty
    group = tl.program_id(0)
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = group * GROUP + tl.arange(0, GROUP)
    inside = (offs_n < N)[:, None] & (offs_k < K)[None, :]
    at = w + offs_n[:, None] * stride_wn + offs_k[None, :].to(tl.int64) * stride_wk
    kept = packed(tl.load(at, mask=inside, other=0.0))  # (BLOCK_N, GROUP), or half as many words of two
    largest = size_amax(packed_magnitudes(kept), 1, DTYPE, NATIVE)
    amax = largest.to(tl.float32, bitcast=True)
    scale = tl.where(amax < AMAX_MIN, 0.0, amax * INVERSE).to(scales.dtype.element_ty)
    tl.store(scales + group.to(tl.int64) * stride_s + offs_n, scale, mask=offs_n < N)
    stored = scale.to(tl.float32)
    inverse = tl.where(stored == 0.0, 0.0, tl.div_rn(1.0, tl.where(stored == 0.0, 1.0, stored)))
    # Where the scale is infinite or NaN no element counts
    kept = tl.where((largest < INFINITY)[:, None], kept, 0)
    inverse = tl.where(largest < INFINITY, inverse, 0.0)[:, None]
    # The bits of 1.5 * 2^23 + n end in those of n, in two's complement
    if BITS == 8:
        scaled = unpacked(kept, inverse, inverse, DTYPE) + ROUND
        integers = scaled.to(tl.int32, bitcast=True)
        tl.store(q + offs_n[:, None] * K + offs_k[None, :], integers.to(tl.int8), mask=inside)
    else:
        low, high = unpacked_halves(kept, inverse, DTYPE)
        low, high = (low + ROUND).to(tl.int32, bitcast=True), (high + ROUND).to(tl.int32, bitcast=True)
        offs_b = group * (GROUP // 2) + tl.arange(0, GROUP // 2)
        inside_b = (offs_n < N)[:, None] & (offs_b < K // 2)[None, :]
        both = (low & 15) | ((high & 15) << 4)
        tl.store(q + offs_n[:, None] * (K // 2) + offs_b[None, :], both.to(tl.uint8), mask=inside_b)


# One rounding for the product and one for ROUND, as in the reference: fused, one element in a thousand differs
_kernel = TritonKernel(_quantize_kernel, enable_fp_fusion=False)


@register_impl(
    "quantize_weight",
    backend="triton",
    configure=configure,
    config_type=Config,
    configs=CONFIGS[:2],
    candidates=candidates,
    supports=no_float64,
)
def launch(outs: tuple[Tensor, Tensor], w: Tensor, bits: int, *, config: Config) -> None:
    q, scales = outs
    n, k = w.shape
    grid = (packing.groups(k), triton.cdiv(n, config.block_n))
    args = (q, scales, w, n, k, scales.stride(1), *w.stride())
    _kernel(grid, args, (bits, compares_pairs(q), config.block_n), num_warps=config.num_warps)
