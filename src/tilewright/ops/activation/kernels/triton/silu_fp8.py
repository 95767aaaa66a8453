"""SiLU gate to e4m3 in Triton, for swiglu_fp8 and silu_and_mul_fp8: the arithmetic of `gated`, quantised in registers.

A program takes a few groups of 128 from each of a few adjacent rows.  Eight lanes hold a group, so that its maximum
takes three shuffles; the scales of one column of groups are adjacent, so that a program writes runs of scales in the
layout that the GEMM reads.  The exponential, a group's reciprocal and the rounding are 28 instructions an element on
sm_90 with 32 elements a thread, 34 with 16; an H200 can issue 36 in the time of the bytes.
Traffic: reads gate and up, writes q and 4 bytes a group, 5.03*M*N bytes at bf16: 8192x14336 cannot beat 141 us at 4.2
TB/s.  The gate and a cast of its result move 9.03*M*N.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.activation import silu_and_mul_fp8, swiglu_fp8
from tilewright.ops.activation.kernels.triton.activations import activate
from tilewright.ops.activation.kernels.triton.gated import gated
from tilewright.ops.quant.kernels.triton.numbers import as_stored, encode, inverse, magnitude, scale_of
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.rows import RowsBucket, as_rows
from tilewright.ops.unaligned_rows import unit_of

GROUP = TOKEN.depth
FILL = 1024  # minimum programs before programs grow: about eight for each SM of an H200


class Config(NamedTuple):
    rows: int  # rows per program
    groups: int  # groups per row of a program
    num_warps: int


SIZES = (Config(8, 4, 4), Config(8, 2, 4), Config(4, 2, 2), Config(2, 2, 1), Config(1, 2, 1))  # 32 to 8 values a thread


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    """The largest program that still gives every SM work; latency decides small problems."""
    fitting, elements = [c for c in SIZES if c.rows <= bucket.M], bucket.M * bucket.N
    return next((c for c in fitting if elements >= FILL * GROUP * c.rows * c.groups), fitting[-1])


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Configurations with 8 to 64 elements a thread."""
    return tuple(
        Config(rows, groups, warps)
        for rows in (1, 2, 4, 8, 16)
        for groups in (1, 2, 4, 8)
        for warps in (1, 2, 4, 8)
        if rows <= bucket.M and GROUP * groups < 2 * bucket.N and 8 <= rows * groups * GROUP // (32 * warps) <= 64
    )


@triton.jit
def _silu_fp8_kernel(
    q, scales, gate, up, R, units, M, unit_stride_gate, unit_stride_up, unit_up_offset, pitch, step,
    UE8M0: tl.constexpr, BATCHED: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip  # q: (R, N), R = batch * M, N = units * UNIT   gate, up: (R, N) by stride   scales: (batch, M, groups)
    N, up_offset = units * UNIT, unit_up_offset * UNIT
    stride_gate, stride_up = unit_stride_gate * UNIT, unit_stride_up * UNIT
    # Load the groups
    blocks_a_row = tl.cdiv(N, 128 * GROUPS)
    index = tl.arange(0, ROWS * GROUPS)  # row index fastest: adjacent scales
    row_idx = (tl.program_id(0) // blocks_a_row) * ROWS + index % ROWS
    group_idx = (tl.program_id(0) % blocks_a_row) * GROUPS + index // ROWS
    offs_n = group_idx[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = (row_idx[:, None] < R) & (offs_n < N)
    row_offsets = row_idx.to(tl.int64)[:, None]
    g = tl.load(gate + row_offsets * stride_gate + offs_n, mask=mask, other=0.0)  # (ROWS * GROUPS, 128)
    u = tl.load(up + (row_offsets * stride_up + up_offset) + offs_n, mask=mask, other=0.0)
    # Activate
    act, _ = activate(g.to(tl.float32), "silu", g.dtype == tl.float32)
    result = gated(act, g, u).to(g.dtype).to(tl.float32)
    # Quantise and store
    scale = scale_of(tl.max(magnitude(result), 1), UE8M0)
    tl.store(q + row_offsets * N + offs_n, encode(result * inverse(scale)[:, None], q), mask=mask)
    group_mask = (row_idx < R) & (group_idx * 128 < N)
    if BATCHED:
        row_idx = row_idx // M * step + row_idx % M
    tl.store(scales + group_idx.to(tl.int64) * pitch + row_idx, scale, mask=group_mask)


_kernel = TritonKernel(_silu_fp8_kernel)


def split(q: Tensor, scales: Tensor, gate: Tensor, up: Tensor, ue8m0: bool, config: Config) -> None:
    """Quantise silu(gate) * up.   gate, up: (..., M, N)."""
    _launch(q, scales, as_rows(gate), as_rows(up), 0, ue8m0, config)


def packed(q: Tensor, scales: Tensor, x: Tensor, ue8m0: bool, config: Config) -> None:
    """Quantise silu(x[..., :N]) * x[..., N:].   x: (..., M, 2N)."""
    x = as_rows(x)
    _launch(q, scales, x, x, x.shape[1] // 2, ue8m0, config)


def _launch(q: Tensor, scales: Tensor, gate: Tensor, up: Tensor, up_offset: int, ue8m0: bool, config: Config) -> None:
    r, m, n = gate.shape[0], q.shape[-2], q.shape[-1]
    batched = r > m
    grid = (triton.cdiv(r, config.rows) * triton.cdiv(n, GROUP * config.groups),)
    sizes = (gate.stride(0), up.stride(0), up_offset)
    unit = unit_of(gate.itemsize, n, *sizes)
    strides = (*(size // unit for size in sizes), scales.stride(-1), scales.stride(-3) if batched else 0)
    constants = (ue8m0, batched, unit, config.rows, config.groups)
    _kernel(grid, (as_stored(q), scales, gate, up, r, n // unit, m, *strides), constants, num_warps=config.num_warps)


_TUNING = {"configure": configure, "config_type": Config, "configs": SIZES, "candidates": candidates}


@register_kernel(swiglu_fp8.FORWARD, **_TUNING)
def launch_swiglu(outs: tuple[Tensor, Tensor], args: swiglu_fp8.SwigluFp8Args, config: Config) -> None:
    split(*outs, args.gate, args.up, args.ue8m0, config)


@register_kernel(silu_and_mul_fp8.FORWARD, **_TUNING)
def launch_silu_and_mul(outs: tuple[Tensor, Tensor], args: silu_and_mul_fp8.SiluAndMulFp8Args, config: Config) -> None:
    packed(*outs, args.x, args.ue8m0, config)
