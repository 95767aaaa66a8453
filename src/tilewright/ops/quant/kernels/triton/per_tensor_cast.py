"""per_tensor_cast_to_fp8 in Triton, two launches: the maximum of each part; then every program reduces them and casts.

The second launch runs from the end of x: the elements that the first read last may still be in L2, 60 MB on an H200.
The maximum of maxima does not depend on an order, so the result is repeatable without atomics.
On Hopper and later the second launch starts beside the first (programmatic dependent launch): where a multiprocessor
has room, programs read their block at once and keep it in registers until the maxima are there.

Traffic: reads x twice, the second time at best only the part that L2 cannot hold, and writes q: 231 MB of 8192x7168
bf16 on an H200, 55 us at 4.2 TB/s.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilewright.dispatch import register_kernel
from tilewright.hardware import device_info
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.quant.kernels.triton.numbers import (
    as_stored,
    compares_pairs,
    encode,
    inverse,
    larger_size,
    packed,
    packed_magnitudes,
    scale_of,
    size_amax,
    unpacked,
)
from tilewright.ops.quant.per_tensor_cast_to_fp8 import FORWARD, PerTensorCastArgs, PerTensorCastBucket
from tilewright.ops.rows import as_rows


class Config(NamedTuple):
    block: int  # elements of a row per step of a program
    num_warps: int
    ctas_per_sm: int  # programs per SM in the first launch


def configure(bucket: PerTensorCastBucket, dtype: torch.dtype) -> Config:
    # 32 elements a thread: 73.5 us at 8192x7168, 77.4 with 64 (4 warps, 8 programs an SM; H200, 2026-11)
    return Config(8192, num_warps=8, ctas_per_sm=4)


CONFIGS = (Config(8192, num_warps=8, ctas_per_sm=4),)


def candidates(bucket: PerTensorCastBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Configurations with 16 to 64 elements a thread and step."""
    return tuple(
        Config(block, warps, ctas)
        for block in (2048, 4096, 8192, 16384)
        for warps in (4, 8, 16)
        for ctas in (2, 4, 8)
        if 16 <= block // (32 * warps) <= 64 and ctas * warps <= 64
    )


@triton.jit
def _block_magnitudes(x, block, K, steps, stride_x, BLOCK: tl.constexpr):
    """`packed_magnitudes` of one block: (1, BLOCK / 2) for a 16-bit dtype."""
    offs = tl.arange(0, BLOCK)[None, :]
    row_idx, start = (block // steps).to(tl.int64), (block % steps).to(tl.int64) * BLOCK
    x_block = tl.load(x + (row_idx * stride_x + start) + offs, mask=offs < K - start, other=0.0)
    return packed_magnitudes(packed(x_block))


@triton.jit
def _amax_kernel(
    partial, x, K, steps, blocks, stride_x,  # x: (R, K), in R * steps blocks   partial: (programs,)
    NATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if NATIVE:
        gdc_launch_dependents()
    DTYPE: tl.constexpr = x.dtype.element_ty
    PAIRS: tl.constexpr = DTYPE.primitive_bitwidth == 16
    # Load the first block before the loop, so that the loop carries the layout of a load
    magnitudes = _block_magnitudes(x, tl.program_id(0), K, steps, stride_x, BLOCK)
    for block in range(tl.program_id(0) + tl.num_programs(0), blocks, tl.num_programs(0)):
        magnitudes = larger_size(magnitudes, _block_magnitudes(x, block, K, steps, stride_x, BLOCK), PAIRS, NATIVE)
    # Store the maximum of this program
    tl.store(partial + tl.program_id(0) + tl.arange(0, 1), size_amax(magnitudes, 1, DTYPE, NATIVE))


@triton.jit
def _cast_kernel(
    q, scale, x, partial, K, steps, blocks, parts, stride_x,  # q, x: (R, K)   scale: (1,)   partial: (parts,)
    EARLY: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    # Load a block, from the end: x is older than both launches
    block = blocks - 1 - tl.program_id(0)
    row_idx, start = (block // steps).to(tl.int64), (block % steps).to(tl.int64) * BLOCK
    offs = tl.arange(0, BLOCK)[None, :]
    mask = offs < K - start
    x_block = tl.load(x + (row_idx * stride_x + start) + offs, mask=mask, other=0.0, eviction_policy="evict_first")
    words = packed(x_block)
    if EARLY:
        gdc_wait()
    # Reduce the maxima to the scale
    offs_p = tl.arange(0, PARTS)
    scale_value = scale_of(tl.max(tl.load(partial + offs_p, mask=offs_p < parts, other=0), 0), False)
    if tl.program_id(0) == 0:
        tl.store(scale, scale_value)
    # Quantise and store
    factor = inverse(scale_value)
    q_ptrs = q + (row_idx * K + start) + offs
    tl.store(q_ptrs, encode(unpacked(words, factor, factor, x.dtype.element_ty), q), mask=mask)


_amax = TritonKernel(_amax_kernel)
_cast = TritonKernel(_cast_kernel)
_cast_early = TritonKernel(_cast_kernel, launch_pdl=True)


@register_kernel(FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates)
def launch(outs: tuple[Tensor, Tensor], args: PerTensorCastArgs, config: Config) -> None:
    q, scale = as_stored(outs[0]), outs[1]
    x = args.x.view(1, -1) if args.x.is_contiguous() else as_rows(args.x)
    (r, k), stride = x.shape, x.stride(0)
    steps = triton.cdiv(k, config.block)
    blocks = r * steps
    programs = min(blocks, config.ctas_per_sm * device_info(x.device).sm_count)
    partial = scratch((programs,), torch.int32, x.device)
    native = compares_pairs(q)  # Hopper and later
    values = (partial, x, k, steps, blocks, stride)
    _amax((programs,), values, (native, config.block), num_warps=config.num_warps)
    values = (q, scale, x, partial, k, steps, blocks, programs, stride)
    constants = (native, config.block, triton.next_power_of_2(programs))
    (_cast_early if native else _cast)((blocks,), values, constants, num_warps=config.num_warps)
