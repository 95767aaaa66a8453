"""Which tiles of a mask are empty, partial or full: closed forms in torch, O(tiles), never S_q x S_k.

Interval arithmetic on the positions and keys of a tile; documents by the least and largest id of a tile, block tables
by sums over rectangles.  Leaves are exact.  Operators follow Kleene's logic, so a tile may be called partial that is
full or empty, never the other way; "every" of a conjunction and "some" of a disjunction stay exact.  Documents whose
ids never decrease, joined by & with a band that holds d = 0, are exact too: where two tiles share a document, their
nearest pair lies in it.  Packed sequences need no band beside them: their intervals have one inside.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.mask.elements import document_ids, prefixes, walk
from tilewright.mask.program import offset, root

_LEAST, _MOST = -(2**31), 2**31 - 1


class States(NamedTuple):
    """May some query of a tile see some key of another, may all see all?  bool (B or 1, H or 1, tiles_q, tiles_k)."""

    some: Tensor
    every: Tensor


class Sizes(NamedTuple):
    """An attention and its tiles."""

    batch: int
    heads: int
    s_q: int
    s_k: int
    block_m: int
    block_n: int

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles of queries and of keys."""
        return -(-self.s_q // self.block_m), -(-self.s_k // self.block_n)


class _Tiles(NamedTuple):
    """First and last position (tiles_q, 1), first and last key (tiles_k,)."""

    p0: Tensor
    p1: Tensor
    j0: Tensor
    j1: Tensor


def classify(program: str, data: Tensor, sizes: Sizes) -> States:
    """States of all tiles.  A tile that hangs over the last key is never full; queries beyond the last do not count."""
    tiles_q, tiles_k = sizes.tiles
    i0 = torch.arange(tiles_q, device=data.device)[:, None] * sizes.block_m
    i1 = (i0 + sizes.block_m).clamp(max=sizes.s_q) - 1
    j0 = torch.arange(tiles_k, device=data.device) * sizes.block_n
    j1 = (j0 + sizes.block_n).clamp(max=sizes.s_k) - 1
    shift = sizes.s_k - sizes.s_q
    where = _Tiles(i0 + shift, i1 + shift, j0, j1)
    some, every = walk(
        program,
        lambda word: _leaf(word, data, sizes, where),
        lambda a: States(~a.every, ~a.some),
        lambda a, b: States(a.some & b.some, a.every & b.every),
        lambda a, b: States(a.some | b.some, a.every | b.every),
    )
    shape = torch.broadcast_shapes(some.shape, every.shape, (1, 1, tiles_q, tiles_k))
    return States(some.expand(shape), (every & (j0 + sizes.block_n <= sizes.s_k)).expand(shape))


def _leaf(word: str, data: Tensor, sizes: Sizes, where: _Tiles) -> States:
    p0, p1, j0, j1 = where
    nearest, furthest = p0 - j1, p1 - j0  # every distance between them occurs
    kind, number = root(word), data[offset(word)]
    if kind == "band":
        low, high = number, data[offset(word) + 1]
        some = torch.maximum(low, nearest) <= torch.minimum(high, furthest)
        return States(some, (low <= nearest) & (furthest <= high))
    if kind == "doc":
        return _document(word, data, sizes, where)
    if kind == "seq":
        return _sequences(word, data, sizes, where)
    if kind == "prefix":
        n = prefixes(word, data, sizes.batch)
        return States(j0 < n, j1 < n)
    if kind == "global":
        return States((p0 < number) | (j0 < number), (p1 < number) | (j1 < number))
    if kind == "dilated":
        some = furthest - furthest % number >= nearest
        return States(some, some & ((furthest == nearest) | (number == 1)))
    if kind == "strided":
        some = (j1 + 1) - (j1 + 1) % number > j0
        return States(some, some & ((j0 == j1) | (number == 1)))
    return _block(word, data, sizes, where)


def _document(word: str, data: Tensor, sizes: Sizes, where: _Tiles) -> States:
    low_q, high_q = _bounds(word, data, sizes.batch, where.p0[:, 0], where.p1[:, 0])
    low_k, high_k = _bounds(word, data, sizes.batch, where.j0, where.j1)
    low_q, high_q, low_k, high_k = low_q[..., None], high_q[..., None], low_k[:, None], high_k[:, None]
    some = torch.maximum(low_q, low_k) <= torch.minimum(high_q, high_k)
    every = (low_q == high_q) & (low_k == high_k) & (low_q == low_k) & (where.p0 >= 0)
    return States(some[:, None], every[:, None])


def _sequences(word: str, data: Tensor, sizes: Sizes, where: _Tiles) -> States:
    """The queries that see a key of j0 .. j1 are among those that end behind j0 and begin no later than j1, an interval
    because neither ever decreases; all others of that interval see nothing.
    """
    rows = torch.arange(3, device=data.device)[:, None] * sizes.s_q + torch.arange(sizes.s_q, device=data.device)
    first, end, count = data[data[offset(word) + 2] + rows]
    i0, i1 = where.p0 - (sizes.s_k - sizes.s_q), where.p1 - (sizes.s_k - sizes.s_q)
    a = torch.maximum(i0, torch.searchsorted(end, where.j0, right=True))
    b = torch.minimum(i1, torch.searchsorted(first, where.j1, right=True) - 1)
    there = a <= b
    a, b = a.clamp(max=sizes.s_q - 1), b.clamp(min=0)
    some = there & ((first[a] < end[a]) | (count[a] < count[b]))
    return States(some, (first[i1] <= where.j0) & (where.j1 < end[i0]))


def _bounds(word: str, data: Tensor, batch: int, start: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest id (B or 1, tiles) of the places start .. last of each tile."""
    widest = int((last - start).max()) + 1 if len(start) else 1
    places = start[:, None] + torch.arange(widest, device=data.device)
    ids, inside = document_ids(word, data, batch, places.flatten())
    ids, counts = ids.unflatten(-1, places.shape), inside.view(places.shape) & (places <= last[:, None])
    return torch.where(counts, ids, _MOST).amin(-1), torch.where(counts, ids, _LEAST).amax(-1)


def _block(word: str, data: Tensor, sizes: Sizes, where: _Tiles) -> States:
    size_q, size_k, rows, columns, heads, at = data[offset(word) : offset(word) + 6].tolist()
    words = -(-columns // 32)
    batch = sizes.batch if ".b" in word else 1
    bits = data[at : at + batch * heads * rows * words].view(batch, heads, rows, words, 1)
    table = ((bits >> torch.arange(32, dtype=torch.int32, device=data.device)) & 1).flatten(-2)[..., :columns]
    below = torch.nn.functional.pad(table.cumsum(-1).cumsum(-2), (1, 0, 1, 0))  # cells above and left of (row, column)
    r0, r1 = where.p0 // size_q, where.p1 // size_q + 1
    c0, c1 = where.j0 // size_k, where.j1 // size_k + 1
    top, bottom, left, right = (
        edge.clamp(0, end) for edge, end in ((r0, rows), (r1, rows), (c0, columns), (c1, columns))
    )
    count = below[..., bottom, right] - below[..., top, right] - below[..., bottom, left] + below[..., top, left]
    return States(count > 0, count == (r1 - r0) * (c1 - c0))
