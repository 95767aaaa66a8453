"""Attention of packed new tokens over a KV cache: sequences of few tokens as `fmha_decode` computes them, sequences of
many in tiles of tokens, each in a launch of its own that passes over the other's.

The division of tokens and keys is made on the device (`paged/tasks.py`), so no launch depends on it: a program whose
number has no task ends at once.  Where T tokens are so few that no sequence can have many, there is one launch.

Traffic: the visible keys and values once for each row tile, most of them from the L2; flops as `fmha`.  31 sequences
of 4096 tokens that decode (32/8 heads, D = 128, bf16) beside a chunk of 512 at the end of 4096: 537 MB, 122 us at
4.4 TB/s, and 32 GFLOP, 40 us at 800 TFLOP/s.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.ops.attention.fmha_paged import FORWARD
from tilewright.ops.attention.kernels.triton.paged import tasks
from tilewright.ops.attention.kernels.triton.paged.launch import Form, Tile, fitted, stages, why_not, width
from tilewright.ops.attention.kernels.triton.paged.launch import launch as launch_form
from tilewright.ops.attention.kernels.triton.tiles import next_power_of_2
from tilewright.ops.attention.paged.args import PagedArgs, PagedBucket

_TOKENS = 4  # of a sequence of few rows, if 64 rows hold the heads of so many


class Config(NamedTuple):
    """The `Tile` for sequences of at most few_m rows, tokens times heads of a group, and that for the others."""

    few_m: int
    few_n: int
    few_warps: int
    few_stages: int
    many_m: int
    many_n: int
    many_warps: int
    many_stages: int

    @property
    def few(self) -> Tile:
        return Tile(self.few_m, self.few_n, self.few_warps, self.few_stages)

    @property
    def many(self) -> Tile:
        return Tile(self.many_m, self.many_n, self.many_warps, self.many_stages)


def _few_m(bucket: PagedBucket) -> int:
    most = 64 if width(bucket.D, bucket.D_v) <= 128 else 32  # of wide heads four warps hold no more
    return min(max(16, next_power_of_2(_TOKENS * bucket.group)), most)


def configure(bucket: PagedBucket, dtype: torch.dtype) -> Config:
    """Those of `fmha_decode`, and 128 rows with eight warps for many tokens, 64 for wide heads.  Not measured yet."""
    columns, few_m = width(bucket.D, bucket.D_v), _few_m(bucket)
    if not bucket.aligned:
        return Config(few_m, 32, 4, 1, 64, 32, 8, 1)
    num_stages = stages(3, bucket.page > 0)
    if columns <= 128:
        return Config(few_m, 64, 4, num_stages, 128, 64, 8, num_stages)
    return Config(few_m, 32, 4, num_stages, 64, 32, 8, num_stages)


def candidates(bucket: PagedBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Each tile beside the default of the other."""
    default, columns, size = configure(bucket, dtype), width(bucket.D, bucket.D_v), dtype.itemsize
    few = (
        default._replace(few_n=n, few_warps=warps, few_stages=stages(depth, bucket.page > 0))
        for n in (32, 64, 128)
        for warps in (4, 8)
        for depth in (2, 3, 4)
        if size * columns * (default.few_m + 2 * depth * n) <= 150 << 10 and default.few_m * columns <= 4096 * warps
    )
    many = (
        default._replace(many_m=m, many_n=n, many_warps=warps, many_stages=stages(depth, bucket.page > 0))
        for m in (64, 128)
        for n in (32, 64, 128)
        for warps in (4, 8)
        for depth in (2, 3, 4)
        if size * columns * (m + 2 * depth * n) <= 227 << 10 and m * (n + 2 * columns) <= warps * 32 * 192
    )
    return tuple(dict.fromkeys((*few, *many)))


CONFIGS = (
    *(Config(m, 32, 4, 1, 64, 32, 8, 1) for m in (16, 32, 64)),
    *(Config(m, 64, 4, num_stages, 128, 64, 8, num_stages) for m in (16, 32, 64) for num_stages in (3, 5)),
    *(Config(m, 32, 4, num_stages, 64, 32, 8, num_stages) for m in (16, 32) for num_stages in (3, 5)),
)


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor, Tensor], args: PagedArgs, config: Config) -> None:
    few, many = fitted(config.few, args), fitted(config.many, args)
    tokens, sequences = args.q.shape[0], args.lengths.shape[0] + 1  # one more: the tokens behind the last one
    rows = tokens * (args.q.shape[1] // args.k_cache.shape[2])
    few_tiles = min(sequences, tokens)
    launch_form(outs, args, few, Form(tasks.FEW.value, few.block_m, few_tiles, few.block_m))
    if rows > few.block_m:
        # A sequence of many has more than few.block_m rows, and one row tile that is not full
        many_tiles = rows // many.block_m + min(sequences, rows // (few.block_m + 1))
        launch_form(outs, args, many, Form(tasks.MANY.value, few.block_m, many_tiles, many.block_m))
