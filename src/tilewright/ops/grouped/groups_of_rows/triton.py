"""groups_of_rows in Triton: two launches, one that writes zeros, and one in which every row looks at its neighbours.

A row whose id differs from the one before begins its group, one whose id differs from the next ends it; they alone
write, so no two write the same number.  4*T bytes read, two launches of about 2 us that no bandwidth shortens.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.jit.triton_launch import TritonKernel


class Config(NamedTuple):
    """block: rows, or groups, of a program."""

    block: int
    num_warps: int


_CONFIGS = (Config(512, 4), Config(1024, 4), Config(2048, 8))


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """A launch's time, whatever the block."""
    return _CONFIGS[0]


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Two to eight rows a thread."""
    return _CONFIGS


@triton.jit
def _clear_kernel(starts, ends, G, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(starts + offs, 0, mask=offs < G)
    tl.store(ends + offs, 0, mask=offs < G)


@triton.jit
def _groups_of_rows_kernel(starts, ends, ids, T, G, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = tl.load(ids + offs, mask=offs < T, other=-1)
    before = tl.load(ids + offs - 1, mask=(offs > 0) & (offs < T), other=-1)
    after = tl.load(ids + offs + 1, mask=offs + 1 < T, other=-1)
    mine = (here >= 0) & (here < G)
    tl.store(starts + here, offs, mask=mine & (before != here))
    tl.store(ends + here, offs + 1, mask=mine & (after != here))


_clear = TritonKernel(_clear_kernel)
_kernel = TritonKernel(_groups_of_rows_kernel)


@register_impl(
    "groups_of_rows",
    backend="triton",
    configure=configure,
    config_type=Config,
    configs=_CONFIGS[:1],
    candidates=candidates,
)
def launch(outs: tuple[Tensor, Tensor], ids: Tensor, groups: int, *, config: Config) -> None:
    starts, ends = outs
    rows = ids.shape[0]
    _clear((triton.cdiv(groups, config.block),), (starts, ends, groups), (config.block,), num_warps=config.num_warps)
    _kernel(
        (triton.cdiv(rows, config.block),),
        (starts, ends, ids, rows, groups),
        (config.block,),
        num_warps=config.num_warps,
    )
