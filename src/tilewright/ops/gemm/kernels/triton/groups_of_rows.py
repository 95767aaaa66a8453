"""groups_of_rows in Triton: one launch that writes zeros, and one that compares every row with its neighbours.

A row whose id differs from the previous one begins its group, one whose id differs from the next ends it; only these
rows write, so each number is written once.  Traffic: 4*T bytes; the two launches of about 2 us take longer.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.gemm.groups_of_rows import FORWARD, GroupsOfRowsArgs, GroupsOfRowsBucket


class Config(NamedTuple):
    """block: rows, or groups, of a program."""

    block: int
    num_warps: int


_CONFIGS = (Config(512, 4), Config(1024, 4), Config(2048, 8))


def configure(bucket: GroupsOfRowsBucket, dtype: torch.dtype) -> Config:
    """Returns the smallest block: the launch dominates."""
    return _CONFIGS[0]


def candidates(bucket: GroupsOfRowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns two to eight rows a thread."""
    return _CONFIGS


@triton.jit
def _clear_kernel(starts, ends, G, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(starts + offs, 0, mask=offs < G)
    tl.store(ends + offs, 0, mask=offs < G)


@triton.jit
def _groups_of_rows_kernel(starts, ends, ids, T, G, BLOCK: tl.constexpr):
    # Load each id and its neighbours
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.load(ids + offs, mask=offs < T, other=-1)
    previous = tl.load(ids + offs - 1, mask=(offs > 0) & (offs < T), other=-1)
    following = tl.load(ids + offs + 1, mask=offs + 1 < T, other=-1)
    # Write where a group begins and ends
    valid = (group >= 0) & (group < G)
    tl.store(starts + group, offs, mask=valid & (previous != group))
    tl.store(ends + group, offs + 1, mask=valid & (following != group))


_clear = TritonKernel(_clear_kernel)
_kernel = TritonKernel(_groups_of_rows_kernel)


@register_kernel(FORWARD, configure=configure, config_type=Config, configs=_CONFIGS[:1], candidates=candidates)
def launch(outs: tuple[Tensor, Tensor], args: GroupsOfRowsArgs, config: Config) -> None:
    ids, groups = args
    starts, ends = outs
    rows = ids.shape[0]
    _clear((triton.cdiv(groups, config.block),), (starts, ends, groups), (config.block,), num_warps=config.num_warps)
    _kernel(
        (triton.cdiv(rows, config.block),),
        (starts, ends, ids, rows, groups),
        (config.block,),
        num_warps=config.num_warps,
    )
