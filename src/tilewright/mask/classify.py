"""Which tiles of a mask are empty, partial or full: closed forms in torch, O(tiles), never S_q x S_k.

Bands use interval arithmetic on the positions and keys of a tile, documents the least and largest id of a tile, block
tables sums over rectangles.  Leaves are exact.  Operators follow Kleene's logic: a full or empty tile may be called
partial, but not the other way round; "every" of a conjunction and "some" of a disjunction stay exact.  Documents whose
ids never decrease, joined by & with a band that contains d = 0, are exact too: where two tiles share a document, their
nearest pair lies in it.  Packed sequences include their band.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.mask.elements import document_ids, prefixes, walk
from tilewright.mask.program import flags, offset, root

_LEAST, _MOST = -(2**31), 2**31 - 1


class States(NamedTuple):
    """some: a query of the tile sees a key; every: all see all keys.  bool (B or 1, H or 1, tiles_q, tiles_k)."""

    some: Tensor
    every: Tensor


class Sizes(NamedTuple):
    """Sizes of an attention and of its tiles."""

    batch: int
    heads: int
    s_q: int
    s_k: int
    block_m: int
    block_n: int

    @property
    def tiles(self) -> tuple[int, int]:
        """Numbers of query tiles and of key tiles."""
        return -(-self.s_q // self.block_m), -(-self.s_k // self.block_n)


class _Tiles(NamedTuple):
    """First and last position (tiles_q, 1), first and last key (tiles_k,)."""

    pos_first: Tensor
    pos_last: Tensor
    key_first: Tensor
    key_last: Tensor


def classify(program: str, data: Tensor, sizes: Sizes) -> States:
    """States of all tiles.  A tile that extends beyond S_k is never full; queries beyond S_q do not count."""
    tiles_q, tiles_k = sizes.tiles
    row_first = torch.arange(tiles_q, device=data.device)[:, None] * sizes.block_m
    row_last = (row_first + sizes.block_m).clamp(max=sizes.s_q) - 1
    key_first = torch.arange(tiles_k, device=data.device) * sizes.block_n
    key_last = (key_first + sizes.block_n).clamp(max=sizes.s_k) - 1
    shift = sizes.s_k - sizes.s_q
    tiles = _Tiles(row_first + shift, row_last + shift, key_first, key_last)
    some, every = walk(
        program,
        lambda word: _leaf(word, data, sizes, tiles),
        lambda a: States(~a.every, ~a.some),
        lambda a, b: States(a.some & b.some, a.every & b.every),
        lambda a, b: States(a.some | b.some, a.every | b.every),
    )
    shape = torch.broadcast_shapes(some.shape, every.shape, (1, 1, tiles_q, tiles_k))
    return States(some.expand(shape), (every & (key_first + sizes.block_n <= sizes.s_k)).expand(shape))


def _leaf(word: str, data: Tensor, sizes: Sizes, tiles: _Tiles) -> States:
    pos_first, pos_last, key_first, key_last = tiles
    nearest, furthest = pos_first - key_last, pos_last - key_first  # every distance between them occurs
    kind, number = root(word), data[offset(word)]
    if kind == "band":
        low, high = number, data[offset(word) + 1]
        some = torch.maximum(low, nearest) <= torch.minimum(high, furthest)
        return States(some, (low <= nearest) & (furthest <= high))
    if kind == "doc":
        return _document(word, data, sizes, tiles)
    if kind == "seq":
        return _sequences(word, data, sizes, tiles)
    if kind == "prefix":
        n = prefixes(word, data, sizes.batch)
        return States(key_first < n, key_last < n)
    if kind == "global":
        return States((pos_first < number) | (key_first < number), (pos_last < number) | (key_last < number))
    if kind == "dilated":
        some = furthest - furthest % number >= nearest
        return States(some, some & ((furthest == nearest) | (number == 1)))
    if kind == "strided":
        some = (key_last + 1) - (key_last + 1) % number > key_first
        return States(some, some & ((key_first == key_last) | (number == 1)))
    return _block(word, data, sizes, tiles)


def _document(word: str, data: Tensor, sizes: Sizes, tiles: _Tiles) -> States:
    low_q, high_q = _bounds(word, data, sizes.batch, tiles.pos_first[:, 0], tiles.pos_last[:, 0])
    low_k, high_k = _bounds(word, data, sizes.batch, tiles.key_first, tiles.key_last)
    low_q, high_q, low_k, high_k = low_q[..., None], high_q[..., None], low_k[:, None], high_k[:, None]
    some = torch.maximum(low_q, low_k) <= torch.minimum(high_q, high_k)
    every = (low_q == high_q) & (low_k == high_k) & (low_q == low_k) & (tiles.pos_first >= 0)
    return States(some[:, None], every[:, None])


def _sequences(word: str, data: Tensor, sizes: Sizes, tiles: _Tiles) -> States:
    """States of packed sequences.

    The queries that see one of the keys key_first .. key_last have intervals that end after key_first and begin at
    key_last or before.  Neither end decreases, so these queries are consecutive; the others among them see no key.
    """
    rows = 3 * torch.arange(sizes.batch if "b" in flags(word) else 1, device=data.device)[:, None]
    places = data[offset(word) + 2] + rows * sizes.s_q + torch.arange(sizes.s_q, device=data.device)
    first, end, count = (data[places + n * sizes.s_q] for n in range(3))
    row_first, row_last = tiles.pos_first - (sizes.s_k - sizes.s_q), tiles.pos_last - (sizes.s_k - sizes.s_q)
    key_first, key_last = (keys.expand(len(first), -1).contiguous() for keys in (tiles.key_first, tiles.key_last))
    a = torch.maximum(row_first, torch.searchsorted(end, key_first, right=True)[:, None])
    b = torch.minimum(row_last, torch.searchsorted(first, key_last, right=True)[:, None] - 1)
    nonempty = a <= b
    a, b = a.clamp(max=sizes.s_q - 1), b.clamp(min=0)
    row = torch.arange(len(first), device=data.device)[:, None, None]
    some = nonempty & ((first[row, a] < end[row, a]) | (count[row, a] < count[row, b]))
    every = (first[row, row_last] <= tiles.key_first) & (tiles.key_last < end[row, row_first])
    return States(some[:, None], every[:, None])


def _bounds(word: str, data: Tensor, batch: int, start: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest id (B or 1, tiles) at start .. last of each tile."""
    widest = int((last - start).max()) + 1 if len(start) else 1
    places = start[:, None] + torch.arange(widest, device=data.device)
    ids, inside = document_ids(word, data, batch, places.flatten())
    ids, counts = ids.unflatten(-1, places.shape), inside.view(places.shape) & (places <= last[:, None])
    return torch.where(counts, ids, _MOST).amin(-1), torch.where(counts, ids, _LEAST).amax(-1)


def _block(word: str, data: Tensor, sizes: Sizes, tiles: _Tiles) -> States:
    size_q, size_k, rows, columns, heads, payload_offset = data[offset(word) : offset(word) + 6].tolist()
    words = -(-columns // 32)
    batch = sizes.batch if ".b" in word else 1
    bits = data[payload_offset : payload_offset + batch * heads * rows * words].view(batch, heads, rows, words, 1)
    table = ((bits >> torch.arange(32, dtype=torch.int32, device=data.device)) & 1).flatten(-2)[..., :columns]
    below = torch.nn.functional.pad(table.cumsum(-1).cumsum(-2), (1, 0, 1, 0))  # cells above and left of (row, column)
    r0, r1 = tiles.pos_first // size_q, tiles.pos_last // size_q + 1
    c0, c1 = tiles.key_first // size_k, tiles.key_last // size_k + 1
    top, bottom, left, right = (
        edge.clamp(0, end) for edge, end in ((r0, rows), (r1, rows), (c0, columns), (c1, columns))
    )
    count = below[..., bottom, right] - below[..., top, right] - below[..., bottom, left] + below[..., top, left]
    return States(count > 0, count == (r1 - r0) * (c1 - c0))
