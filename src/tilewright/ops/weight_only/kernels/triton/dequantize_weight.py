"""dequantize_weight in Triton: a program dequantizes one group of several rows, in registers.

Traffic: N K (N K / 2 at 4 bits) bytes and the scales read, 2 N K written as bf16; 28672 x 4096 of 4 bits, 297 MB,
cannot take less than 69 us at 4.3 TB/s.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.rows import no_float64
from tilewright.ops.weight_only import packing
from tilewright.ops.weight_only.dequantize_weight import FORWARD, DequantizeWeightArgs, DequantizeWeightBucket


class Config(NamedTuple):
    """block_n: rows of a program."""

    block_n: int
    num_warps: int


CONFIGS = (Config(16, 4), Config(32, 4), Config(64, 8))


def configure(bucket: DequantizeWeightBucket, dtype: torch.dtype) -> Config:
    """Chooses 16 elements a thread at 8 bits, 16 bytes; 32 at 4 bits.

    H200, 2026-11, 28672x4096: int8 86.9 us with 16 rows, 87.8 with 32; int4 76.3 and 74.3.
    """
    return Config(16, 4) if bucket.bits == 8 else Config(32, 4)


def candidates(bucket: DequantizeWeightBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return CONFIGS


@triton.jit
def _dequantize_kernel(
    w, q, scales, N, K, stride_sn, stride_sg,  # w: (N, K)  q: (N, K) or (N, K / 2)  scales: (N, groups)
    BITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes w = q * scale, with one scale for each group of 128."""
    GROUP: tl.constexpr = 128
    group = tl.program_id(0)
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = group * GROUP + tl.arange(0, GROUP)
    mask_n = offs_n < N
    mask = mask_n[:, None] & (offs_k < K)[None, :]

    # Load the integers
    if BITS == 8:
        integers = tl.load(q + offs_n[:, None] * K + offs_k[None, :], mask=mask, other=0)  # (BLOCK_N, GROUP)
    else:
        offs_b = group * (GROUP // 2) + tl.arange(0, GROUP // 2)
        mask_b = mask_n[:, None] & (offs_b < K // 2)[None, :]
        packed_bytes = tl.load(q + offs_n[:, None] * (K // 2) + offs_b[None, :], mask=mask_b, other=0).to(
            tl.int8, bitcast=True
        )
        integers = tl.reshape(tl.join((packed_bytes << 4) >> 4, packed_bytes >> 4), (BLOCK_N, GROUP))

    # Scale and store
    scale = tl.load(scales + offs_n * stride_sn + group.to(tl.int64) * stride_sg, mask=mask_n, other=0.0)
    value = integers.to(tl.float32) * scale.to(tl.float32)[:, None]
    tl.store(w + offs_n[:, None] * K + offs_k[None, :], value.to(w.dtype.element_ty), mask=mask)


_kernel = TritonKernel(_dequantize_kernel)


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS[:2],
    candidates=candidates,
    why_not=lambda args: no_float64(*args),
)
def launch(outs: tuple[Tensor], args: DequantizeWeightArgs, config: Config) -> None:
    n, k = outs[0].shape
    grid = (packing.groups(k), triton.cdiv(n, config.block_n))
    values = (outs[0], args.q, args.scales, n, k, *args.scales.stride())
    _kernel(grid, values, (packing.bits_of(args.q), config.block_n), num_warps=config.num_warps)
