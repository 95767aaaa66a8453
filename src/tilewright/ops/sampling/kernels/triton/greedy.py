"""greedy in Triton: programs find the best token of their parts of a row, a second launch the best of the parts.

A candidate is one int64, the ordered logit above and the complement of the token below, so that a maximum also settles
ties.  Traffic: reads the logits once; 128 x 131072 float32, 67 MB, cannot take less than 15 us at 4.4 TB/s.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.rows import RowsBucket, as_rows, no_float64
from tilewright.ops.sampling.greedy import FORWARD, GreedyArgs
from tilewright.ops.sampling.kernels.triton.numbers import NOTHING, load_clean, ordered


class Config(NamedTuple):
    """block: tokens of a program."""

    block: int
    num_warps: int


CONFIGS = (Config(1024, 4), Config(2048, 4), Config(4096, 8), Config(8192, 8), Config(16384, 16))


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    """Chooses parts of 1024 tokens for a few rows, which then fill the GPU, and 8192 for many.  Unmeasured."""
    return CONFIGS[0] if bucket.M * bucket.N <= 1 << 18 else CONFIGS[3]


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return CONFIGS


@triton.jit
def _part_kernel(best, x, N, parts, stride_x, BLOCK: tl.constexpr):  # best: (M, parts) int64
    """The best candidate of one part of a row."""
    row, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    offs = part * BLOCK + tl.arange(0, BLOCK)
    key = ordered(load_clean(x + row.to(tl.int64) * stride_x, offs, offs < N)).to(tl.int64)
    tl.store(best + tl.program_id(0), tl.max((key << 32) | (0x7FFFFFFF - offs).to(tl.int64), 0))


@triton.jit
def _best_kernel(tokens, best, parts, PARTS: tl.constexpr):
    """The token of the best candidate of a row."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, PARTS)
    lowest = tl.full((PARTS,), -9223372036854775808, tl.int64)
    winner = tl.max(tl.load(best + row * parts + offs, mask=offs < parts, other=lowest), 0)
    token = 0x7FFFFFFF - (winner & 0xFFFFFFFF)
    tl.store(tokens + row, tl.where((winner >> 32) > NOTHING, token, -1))


_part = TritonKernel(_part_kernel)
_best = TritonKernel(_best_kernel)


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=(CONFIGS[0], CONFIGS[3]),
    candidates=candidates,
    why_not=lambda args: no_float64(*args),
)
def launch(outs: tuple[Tensor], args: GreedyArgs, config: Config) -> None:
    x = as_rows(args.logits)
    m, n = x.shape
    parts = triton.cdiv(n, config.block)
    best = scratch((m, parts), torch.int64, x.device)
    _part((m * parts,), (best, x, n, parts, x.stride(0)), (config.block,), num_warps=config.num_warps)
    _best((m,), (outs[0], best, parts), (triton.next_power_of_2(parts),), num_warps=4)
