"""Tile tables: for each tile the partial tiles, in which a kernel evaluates the mask, then the full ones."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.mask.algebra import Mask
from tilewright.mask.classify import Sizes, classify

MOST_INT16 = 2**15
"""Number of tiles that int16 can index."""


class TileTable(NamedTuple):
    """The tiles that each tile needs; B or H is 1 where the mask does not depend on it.

    counts: (B, H, tiles, 2) int32, how many are partial, how many full.  indices: (B, H, tiles, pitch) int16 or int32,
    the partial ones ascending, then the full ones ascending, then undefined values.
    """

    counts: Tensor
    indices: Tensor


def tile_table(
    mask: Mask,
    batch: int,
    heads: int,
    s_q: int,
    s_k: int,
    block_m: int,
    block_n: int,
    by: Literal["query", "key"] = "query",
    device: torch.device | str = "cpu",
) -> TileTable:
    """The table of a mask on `device`.  by: rows are tiles of queries and list tiles of keys, or the other way round.

    A tile is full if each of its queries below S_q sees all block_n keys: a tile that extends beyond S_k is not full.
    """
    mask.check(batch, heads, s_q, s_k)
    return tile_table_of(*mask.program(device), batch, heads, s_q, s_k, block_m, block_n, by)


def tile_table_of(
    program: str,
    data: Tensor,
    batch: int,
    heads: int,
    s_q: int,
    s_k: int,
    block_m: int,
    block_n: int,
    by: Literal["query", "key"] = "query",
) -> TileTable:
    """`tile_table` of a program, on the device of `data`: at most two launches on a GPU, no synchronisation."""
    if by not in ("query", "key"):
        raise InputError(f"tile_table: by={by!r}; allowed: 'query', 'key'")
    sizes = Sizes(batch, heads, s_q, s_k, block_m, block_n)
    if data.device.type == "cpu":
        return _table(program, data, sizes, by)
    from tilewright.mask.triton_tables import build

    return build(program, data, sizes, by)


def index_dtype(tiles: int) -> torch.dtype:
    """The dtype of tile numbers."""
    return torch.int16 if tiles <= MOST_INT16 else torch.int32


def _table(program: str, data: Tensor, sizes: Sizes, axis: str) -> TileTable:
    some, every = classify(program, data, sizes)
    if axis == "key":
        some, every = some.mT, every.mT
    partial = some & ~every
    # A stable sort of 0 partial, 1 full, 2 empty keeps each group ascending
    order = torch.argsort(2 - every.int() - 2 * partial.int(), dim=-1, stable=True)
    counts = torch.stack((partial.sum(-1), every.sum(-1)), -1)
    return TileTable(counts.int(), order.to(index_dtype(order.shape[-1])))
