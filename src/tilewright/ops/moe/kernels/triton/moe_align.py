"""moe_align in Triton: count the experts of each part of the slots, then place each part behind those before it.

Up to PARTS programs take equal parts of the slots.  The first launch counts, an integer for each part and expert; in
the second a program adds the counts of all parts, and of those before its own, and places its slots: the rank of a slot
among equals of its block comes from comparing all pairs of the block.  Nothing is added atomically, so the order is
stable and repeats.  A single part is counted and placed by one launch.

Traffic: the ids twice, 8 bytes a slot written; 32768 slots and 256 experts are 0.9 MB, so launches and the chain of
steps of one program decide.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.moe.moe_align import FORWARD, MoeAlignArgs, MoeAlignBucket

MOST_EXPERTS = 2048
PAIRS = tl.constexpr(32)  # slots with which a block is compared at once


class Config(NamedTuple):
    """block: slots that are compared in pairs.   parts: programs at most.   alone: blocks that one program takes."""

    block: int
    parts: int
    alone: int
    num_warps: int


CONFIGS = (Config(64, 128, 1, 2), Config(128, 128, 1, 4))


def configure(bucket: MoeAlignBucket, dtype: torch.dtype) -> Config:
    """Chooses many short parts.  8 slots of 256 experts take 3.4 us, 512 of 128 4.9, and 10.5 with blocks of 128 in one
    program; 32768 of 256 12.1, 65536 of 128 16.0 (H100, 2026-11).
    """
    return CONFIGS[0] if bucket.S <= 4096 else CONFIGS[1]


def candidates(bucket: MoeAlignBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return tuple(Config(block, parts, 1, warps) for block, warps in ((64, 2), (64, 4), (128, 4)) for parts in (64, 128))


@triton.jit
def _experts(ids, expert_map, offs, S, E, KNOWN):
    """Experts of these slots; E for dropped ones and beyond the last slot."""
    expert = tl.load(ids + offs, mask=offs < S, other=-1).to(tl.int64)
    if expert_map is not None:
        inside = (expert >= 0) & (expert < KNOWN)
        expert = tl.load(expert_map + expert, mask=inside, other=-1).to(tl.int64)
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit
def _counted(ids, expert_map, first, end, S, E, KNOWN, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr):
    """How many slots of first..end-1 each expert has."""
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(first, end, BLOCK):
        expert = _experts(ids, expert_map, start + tl.arange(0, BLOCK), S, E, KNOWN)
        counts += tl.histogram(tl.minimum(expert, BLOCK_E - 1), BLOCK_E, mask=expert < E)
    return counts


@triton.jit
def _count_kernel(counts, ids, expert_map, S, E, KNOWN, per_part, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr):
    part = tl.program_id(0)
    first = part * per_part
    counted = _counted(ids, expert_map, first, first + per_part, S, E, KNOWN, BLOCK, BLOCK_E)
    tl.store(counts + part * BLOCK_E + tl.arange(0, BLOCK_E), counted)


@triton.jit
def _place_kernel(
    slots, positions, starts, ends, counts, ids, expert_map, S, E, KNOWN, parts, per_part,
    BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    first = part * per_part
    offs_e = tl.arange(0, BLOCK_E)

    # Rows of each expert, and those before this part
    before = tl.zeros((BLOCK_E,), tl.int32)
    if counts is None:
        total = _counted(ids, expert_map, first, first + per_part, S, E, KNOWN, BLOCK, BLOCK_E)
    else:
        total = tl.zeros((BLOCK_E,), tl.int32)
        for start in range(0, parts, BLOCK_P):
            offs_p = start + tl.arange(0, BLOCK_P)[:, None]
            counted = tl.load(counts + offs_p * BLOCK_E + offs_e[None, :], mask=offs_p < parts, other=0)
            total += tl.sum(counted, 0)
            before += tl.sum(tl.where(offs_p < part, counted, 0), 0)
    last = tl.cumsum(total, 0)
    if part == 0:
        tl.store(starts + offs_e, last - total, mask=offs_e < E)
        tl.store(ends + offs_e, last, mask=offs_e < E)
    next_row = last - total + before
    next_dropped = tl.sum(total) + first - tl.sum(before)

    # Place the slots, block by block
    offs = tl.arange(0, BLOCK)
    for start in range(first, first + per_part, BLOCK):
        slot = start + offs
        expert = _experts(ids, expert_map, slot, S, E, KNOWN)
        rank = tl.zeros((BLOCK,), tl.int32)
        for first_other in range(start, start + BLOCK, PAIRS):
            other_slot = first_other + tl.arange(0, PAIRS)[None, :]
            other = _experts(ids, expert_map, other_slot, S, E, KNOWN)
            equal = (expert[:, None] == other) & (other_slot < slot[:, None])  # (BLOCK, PAIRS)
            rank += tl.sum(equal.to(tl.int32), 1)
        dropped = expert == E
        row = tl.where(dropped, next_dropped, tl.gather(next_row, tl.where(dropped, 0, expert), 0)) + rank
        tl.store(slots + row, slot, mask=slot < S)
        tl.store(positions + slot, tl.where(dropped, -1, row), mask=slot < S)
        counted = tl.histogram(tl.minimum(expert, BLOCK_E - 1), BLOCK_E, mask=expert < E)
        next_row += counted
        next_dropped += BLOCK - tl.sum(counted)


_count = TritonKernel(_count_kernel)
_place = TritonKernel(_place_kernel)


def why_not(args: MoeAlignArgs) -> str | None:
    if args.num_experts > MOST_EXPERTS:
        return f"takes up to {MOST_EXPERTS} experts"
    return None


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor, Tensor, Tensor, Tensor], args: MoeAlignArgs, config: Config) -> None:
    ids, expert_map, experts = args.topk_ids.contiguous(), args.expert_map, args.num_experts
    expert_map = None if expert_map is None else expert_map.contiguous()
    count = ids.numel()
    block = config.block
    blocks = triton.cdiv(count, block)
    parts = 1 if blocks <= config.alone else min(blocks, config.parts)
    per_part = triton.cdiv(blocks, parts) * block
    parts = triton.cdiv(count, per_part)
    block_e = triton.next_power_of_2(experts)
    map_size = experts if expert_map is None else expert_map.shape[0]
    counts = scratch((parts, block_e), torch.int32, ids.device) if parts > 1 else None
    sizes = (count, experts, map_size)
    if parts > 1:
        _count((parts,), (counts, ids, expert_map, *sizes, per_part), (block, block_e), num_warps=config.num_warps)
    _place(
        (parts,),
        (*outs, counts, ids, expert_map, *sizes, parts, per_part),
        (block, block_e, max(1, min(triton.next_power_of_2(parts), 32, 8192 // block_e))),
        num_warps=config.num_warps,
    )
