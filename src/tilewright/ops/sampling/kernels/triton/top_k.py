"""top_k in Triton: the k best of each part of a row, then the k best of these, until one part is left.

A candidate is one int64, the ordered element above and the complement of its index below: candidates differ, so their
order settles ties too.  Traffic: x once, and k of each part; 128 x 131072 float32, 67 MB, cannot take less than 15 us.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.rows import as_rows, no_float64
from tilewright.ops.sampling.kernels.triton.numbers import ordered
from tilewright.ops.sampling.top_k import FORWARD, TopKArgs, TopKBucket

MOST = 256
ABSENT = tl.constexpr(-9223372036854775808)


class Config(NamedTuple):
    """block: candidates of a program, at least twice k."""

    block: int
    num_warps: int


CONFIGS = (Config(512, 4), Config(1024, 4), Config(2048, 8))


def configure(bucket: TopKBucket, dtype: torch.dtype) -> Config:
    """Chooses the shortest parts that take a row at once or leave one in eight.  Unmeasured."""
    return CONFIGS[0] if bucket.N <= 512 or bucket.K <= 64 else CONFIGS[2]


def candidates(bucket: TopKBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return tuple(config for config in CONFIGS if config.block >= 2 * triton.next_power_of_2(bucket.K))


@triton.jit
def _select_kernel(
    best, values, indices, x, candidates, N, K, parts, stride_x,  # best: (M, parts, KEPT)  candidates: (M, N)
    FIRST: tl.constexpr, LAST: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The KEPT best candidates of one part.   FIRST: they are made of x.   LAST: one part is left, the result."""
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    offs = part * BLOCK + tl.arange(0, BLOCK)
    x += row * stride_x
    absent = tl.full((BLOCK,), ABSENT, tl.int64)
    if FIRST:
        element = tl.load(x + offs, mask=offs < N, other=0.0).to(tl.float32)
        key = tl.where(element == element, ordered(element), 0x7FFFFFFF).to(tl.int64)
        candidate = tl.where(offs < N, (key << 32) | (0x7FFFFFFF - offs).to(tl.int64), absent)
    else:
        candidate = tl.load(candidates + row * N + offs, mask=offs < N, other=ABSENT)
    best_k = tl.topk(candidate, KEPT)
    offs_k = tl.arange(0, KEPT)
    if LAST:
        mask = offs_k < K
        index = 0x7FFFFFFF - (best_k & 0xFFFFFFFF)
        tl.store(indices + row * K + offs_k, index, mask=mask)
        tl.store(values + row * K + offs_k, tl.load(x + index, mask=mask), mask=mask)
    else:
        tl.store(best + tl.program_id(0).to(tl.int64) * KEPT + offs_k, best_k)


_select = TritonKernel(_select_kernel)


def why_not(args: TopKArgs) -> str | None:
    return no_float64(*args) or (f"takes k up to {MOST}" if args.k > MOST else None)


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=(CONFIGS[0], CONFIGS[2]), candidates=candidates,
    why_not=why_not,
)  # fmt: skip
def launch(outs: tuple[Tensor, Tensor], args: TopKArgs, config: Config) -> None:
    x = as_rows(args.x)
    m, n = x.shape
    best_k = max(2, triton.next_power_of_2(args.k))
    block = max(config.block, 2 * best_k)
    best, first = outs[1], True  # the first launch reads no candidates
    while True:
        parts = triton.cdiv(n, block)
        previous = best
        best = scratch((m, parts, best_k), torch.int64, x.device) if parts > 1 else outs[1]
        _select(
            (m * parts,),
            (best, *outs, x, previous, n, args.k, parts, x.stride(0)),
            (first, parts == 1, best_k, block),
            num_warps=config.num_warps,
        )
        if parts == 1:
            return
        n, first = parts * best_k, False
