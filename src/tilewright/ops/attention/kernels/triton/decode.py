"""Attention of one query token over a long cache: programs take splits of the keys, then the parts are combined.

It serves the decode step of `tilewright.generate`.

One query token has too few rows to fill a GPU: batch 1 with 8 key heads is 8 independent problems for 132 SMs. So the
interval of visible positions is cut into `splits` chunks, each program keeps a running softmax over its chunk for all
query heads of one key head (the keys are read once for the whole group), and a second kernel combines the parts by
their maxima. The interval is read from device memory: one captured launch serves every length, and slots outside the
interval are never touched.

Traffic: K and V of the visible positions once, 2 * B * H_kv * n * D values, plus B * H * splits * (D + 2) fp32 written
and read. Batch 1, 8 key heads, D 128, bf16, n 2048: 8.4 MB cannot take less than 2 us at 4.2 TB/s.
The split follows Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.hardware import device_info
from tilewright.jit.triton_launch import TritonKernel

_LOG2E = 1.4426950408889634
MOST_D = 256
_WARPS = 4


class Config(NamedTuple):
    """Splits of the interval of one call, and keys per block."""

    splits: int
    block_n: int


def choose(batch: int, kv_heads: int, head_dim: int, capacity: int, sm_count: int) -> Config:
    """About two programs an SM, so that one has loads in flight while the other computes.

    `splits` does not depend on how much of the cache is in use: a captured graph must serve every length.
    """
    block_n = 64 if head_dim <= 128 else 32  # K and V tiles of 16 KB each
    filling = max(1, 2 * sm_count // (batch * kv_heads))
    max_splits = max(1, capacity // block_n)
    return Config(splits=min(1 << (min(filling, max_splits).bit_length() - 1), 64), block_n=block_n)


@torch.compiler.assume_constant_result
def _processors(index: int) -> int:
    """Number of SMs of a CUDA device; torch.compile treats it as a constant."""
    return device_info(torch.device("cuda", index)).sm_count


@triton.jit
def _part_kernel(
    q, k, v, bounds, acc_out, stat_out,  # q: (B, H, 1, D_K)  k, v: (B, H_kv, capacity, D)  bounds: (B, 2)
    scale, capacity,
    q_batch, q_head, k_batch, k_head, k_slot, v_batch, v_head, v_slot,
    GROUP: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    head, batch, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    heads = tl.num_programs(0) * GROUP
    offs_g, offs_n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_N)
    offs_dk, offs_dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)

    # Find this program's positions: [start, stop), whole blocks except the last one
    begin = tl.load(bounds + batch * 2).to(tl.int32)
    end = tl.load(bounds + batch * 2 + 1).to(tl.int32) + 1
    chunk = tl.cdiv(tl.cdiv(end - begin, SPLITS), BLOCK_N) * BLOCK_N
    start = begin + split * chunk
    stop = tl.minimum(start + chunk, end)

    # Load the queries of the group
    q_rows = q + batch * q_batch + (head * GROUP + offs_g[:, None]) * q_head + offs_dk[None, :]
    q_mask = (offs_g[:, None] < GROUP) & (offs_dk[None, :] < D_K)
    q_tile = tl.load(q_rows, mask=q_mask, other=0.0)  # (BLOCK_G, BLOCK_DK)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head

    # Running softmax in base 2, in fp32: m_i maximum, l_i sum, acc weighted values
    m_i = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_DV), tl.float32)
    for block_start in range(start, stop, BLOCK_N):
        position = block_start + offs_n
        in_chunk = position < stop
        slot = (position % capacity).to(tl.int64)
        # Load one K/V tile
        k_tile = tl.load(  # (BLOCK_DK, BLOCK_N)
            k + slot[None, :] * k_slot + offs_dk[:, None], mask=in_chunk[None, :] & (offs_dk[:, None] < D_K), other=0.0
        )
        v_tile = tl.load(  # (BLOCK_N, BLOCK_DV)
            v + slot[:, None] * v_slot + offs_dv[None, :], mask=in_chunk[:, None] & (offs_dv[None, :] < D_V), other=0.0
        )
        # Scores; Inductor passes scale as fp64
        s = tl.dot(q_tile, k_tile, input_precision="ieee") * tl.cast(scale, tl.float32)
        s = tl.where(in_chunk[None, :], s, float("-inf"))  # (BLOCK_G, BLOCK_N)
        # Update maximum, sum and acc
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
        m_i = m_new

    # Store the part; an empty chunk stores m_i = -inf, l_i = 0, acc = 0 and has no weight in the combination
    row = (batch * heads + head * GROUP + offs_g) * SPLITS + split
    head_mask = offs_g < GROUP
    tl.store(acc_out + row[:, None] * D_V + offs_dv[None, :], acc, mask=head_mask[:, None] & (offs_dv[None, :] < D_V))
    tl.store(stat_out + row * 2, m_i, mask=head_mask)
    tl.store(stat_out + row * 2 + 1, l_i, mask=head_mask)


@triton.jit
def _combine_kernel(
    acc_in, stat_in, out,  # acc_in: (B*H, SPLITS, D_V)  stat_in: (B*H, SPLITS, 2)  out: (B*H, D_V)
    D_V: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    # Load the maxima and sums of the splits
    row = tl.program_id(0).to(tl.int64)
    offs_s, offs_d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_DV)
    m_i = tl.load(stat_in + (row * SPLITS + offs_s) * 2)
    l_i = tl.load(stat_in + (row * SPLITS + offs_s) * 2 + 1)
    alpha = tl.exp2(m_i - tl.max(m_i, 0))  # (SPLITS,)
    # Combine and store
    acc = tl.load(
        acc_in + (row * SPLITS + offs_s[:, None]) * D_V + offs_d[None, :], mask=offs_d[None, :] < D_V, other=0.0
    )
    o = tl.sum(acc * alpha[:, None], 0) / tl.sum(l_i * alpha, 0)
    tl.store(out + row * D_V + offs_d, o.to(out.dtype.element_ty), mask=offs_d < D_V)


PARTS, COMBINE = TritonKernel(_part_kernel), TritonKernel(_combine_kernel)


def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of one query token in two launches, which read only the positions of the interval.

    q: (B, H, 1, D) bf16|fp16|fp32   k: (B, H_kv, capacity, D), v: (B, H_kv, capacity, D_v): possibly a ring
    bounds: first and last position of each row, (B, 1, 1, 2) int64   -> (B, 1, H, D_v).  D and D_v at most MOST_D.
    """
    batch, heads, _, d_k = q.shape
    kv_heads, capacity, d_v = v.shape[1:]
    if q.stride(-1) != 1:
        q = q.contiguous()
    group = heads // kv_heads
    splits, block_n = choose(batch, kv_heads, max(d_k, d_v), capacity, _processors(q.device.index or 0))
    acc = q.new_empty((batch * heads, splits, d_v), dtype=torch.float32)
    stat = q.new_empty((batch * heads, splits, 2), dtype=torch.float32)
    out = q.new_empty((batch, 1, heads, d_v))
    block_dv = triton.next_power_of_2(d_v)
    strides = *q.stride()[:2], *k.stride()[:3], *v.stride()[:3]
    block_g = max(16, triton.next_power_of_2(group))  # the matrix unit takes at least 16 rows
    block_dk = max(16, triton.next_power_of_2(d_k))
    _launch(
        _part_kernel,
        PARTS,
        (kv_heads, batch, splits),
        (q, k, v, bounds, acc, stat, scale * _LOG2E, capacity, *strides),
        (group, d_k, d_v, block_g, block_dk, max(16, block_dv), block_n, splits),
        stages=2,
    )
    _launch(_combine_kernel, COMBINE, (batch * heads,), (acc, stat, out), (d_v, block_dv, splits), stages=1)
    return out


def _launch(
    fn: Any, kernel: TritonKernel, grid: tuple[int, ...], args: tuple[Any, ...], constants: tuple[Any, ...], stages: int
) -> None:
    """Launch on the current stream; under torch.compile, trace the kernel's function into the graph."""
    if torch.compiler.is_compiling():
        fn[grid](*args, *constants, num_warps=_WARPS, num_stages=stages)
    else:
        kernel(grid, args, constants, num_warps=_WARPS, num_stages=stages)
