"""Tile tables on the GPU: the closed forms of `classify`, written as lists for kernels.

The bounds kernel handles documents: one program per tile finds the least and largest id in it; it reads the ids twice
(as query tiles and as key tiles), 1 MB at 131072 tokens.  For packed sequences it finds, by binary search, the queries
that may see a key tile.  The table kernel has one program per row of the table.  It classifies CHUNK tiles at a time,
twice: once to count the partial ones, which come first in the list, and once to write; 2 MB at 1024 x 1024 tiles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.mask import program as _program
from tilewright.mask.classify import Sizes
from tilewright.mask.tables import TileTable, index_dtype
from tilewright.mask.triton_program import first, flags, offset, prefix, root, second, table, words_of_row

CHUNK = 1024  # tiles at once: all of them up to 131072 tokens in tiles of 128

_LEAST, _MOST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)

document = triton.constexpr_function(_program.document)
document_count = triton.constexpr_function(_program.document_count)
document_number = triton.constexpr_function(_program.document_number)


@triton.jit(do_not_specialize=["S_q", "S_k", "tiles_q", "tiles_k", "block_m", "block_n"])
def _bounds_kernel(
    bounds, data, S_q, S_k, tiles_q, tiles_k, block_m, block_n,  # bounds: (documents, B, tiles_q + tiles_k, 2)
    PROGRAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile, b = tl.program_id(0), tl.program_id(1)
    is_query_tile = tile < tiles_q
    start = tl.where(is_query_tile, tile * block_m, (tile - tiles_q) * block_n)
    end = tl.where(is_query_tile, tl.minimum(start + block_m, S_q), tl.minimum(start + block_n, S_k))
    offs = start + tl.arange(0, BLOCK)
    inside = offs < end
    offs += tl.where(is_query_tile, S_k - S_q, 0)
    inside &= offs >= 0
    for n in tl.static_range(document_count(PROGRAM)):
        ptr = bounds + 2 * ((n * tl.num_programs(1) + b) * tl.num_programs(0) + tile)
        if root(document(PROGRAM, n)) == "seq":
            firsts = data + tl.load(data + offset(document(PROGRAM, n)) + 2)
            if flags(document(PROGRAM, n)) == "b":
                firsts += b * 3 * S_q
            queries = tl.where(is_query_tile, 0, S_q)  # query tiles need no search
            tl.store(ptr, _count_below(firsts + S_q, queries, start + 1))
            tl.store(ptr + 1, _count_below(firsts, queries, end) - 1)
        else:
            ids = data + tl.load(data + offset(document(PROGRAM, n)) + 1)
            if flags(document(PROGRAM, n)) == "b":
                ids += b * S_k
            loaded = tl.load(ids + offs, mask=inside, other=0)
            tl.store(ptr, tl.min(tl.where(inside, loaded, _MOST), 0))
            tl.store(ptr + 1, tl.max(tl.where(inside, loaded, _LEAST), 0))


@triton.jit
def _count_below(numbers, count, limit):
    """Number of the ascending `numbers` (count,) below `limit`."""
    low, high = count * 0, count
    while low < high:
        middle = (low + high) // 2
        below = tl.load(numbers + middle) < limit
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def _states(
    PROGRAM: tl.constexpr, WHOLE: tl.constexpr, data, bounds, b, h, q, k, S_q, S_k, tiles_q, tiles_k, block_m, block_n
):
    """(some, every) of query tile q and key tile k; one is a scalar, the other a vector."""
    kind: tl.constexpr = root(PROGRAM)
    if kind == "&" or kind == "|":
        some, every = _states(
            first(PROGRAM), WHOLE, data, bounds, b, h, q, k, S_q, S_k, tiles_q, tiles_k, block_m, block_n
        )
        other_some, other_every = _states(
            second(PROGRAM), WHOLE, data, bounds, b, h, q, k, S_q, S_k, tiles_q, tiles_k, block_m, block_n
        )
        if kind == "&":
            some, every = some & other_some, every & other_every
        else:
            some, every = some | other_some, every | other_every
    elif kind == "~":
        not_every, not_some = _states(
            second(PROGRAM), WHOLE, data, bounds, b, h, q, k, S_q, S_k, tiles_q, tiles_k, block_m, block_n
        )
        some, every = ~not_some, ~not_every
    else:
        pos_first, pos_last = q * block_m + S_k - S_q, tl.minimum(q * block_m + block_m, S_q) - 1 + S_k - S_q
        key_first, key_last = k * block_n, tl.minimum(k * block_n + block_n, S_k) - 1
        if kind == "doc":
            tiles = tiles_q + tiles_k
            leaf_flags: tl.constexpr = flags(PROGRAM)
            row = bounds + 2 * document_number(WHOLE, PROGRAM) * tl.num_programs(2) * tiles
            if leaf_flags == "b":
                row += 2 * b * tiles
            low_q, high_q = tl.load(row + 2 * q), tl.load(row + 2 * q + 1)
            low_k, high_k = tl.load(row + 2 * (tiles_q + k)), tl.load(row + 2 * (tiles_q + k) + 1)
            some = tl.maximum(low_q, low_k) <= tl.minimum(high_q, high_k)
            every = (low_q == high_q) & (low_k == high_k) & (low_q == low_k) & (pos_first >= 0)
        elif kind == "seq":
            firsts = data + tl.load(data + offset(PROGRAM) + 2)
            tiles = tiles_q + tiles_k
            row = bounds + 2 * (document_number(WHOLE, PROGRAM) * tl.num_programs(2) * tiles + tiles_q + k)
            seq_flags: tl.constexpr = flags(PROGRAM)
            if seq_flags == "b":
                firsts += b * 3 * S_q
                row += 2 * b * tiles
            ends, counts = firsts + S_q, firsts + 2 * S_q
            row_first, row_last = q * block_m, tl.minimum(q * block_m + block_m, S_q) - 1
            a, z = tl.maximum(row_first, tl.load(row)), tl.minimum(row_last, tl.load(row + 1))
            nonempty = a <= z
            a, z = tl.minimum(a, S_q - 1), tl.maximum(z, 0)
            some = (tl.load(firsts + a) < tl.load(ends + a)) | (tl.load(counts + a) < tl.load(counts + z))
            some &= nonempty
            every = (tl.load(firsts + row_last) <= key_first) & (tl.load(ends + row_first) > key_last)
        else:
            some, every = _closed_form(
                PROGRAM, data + offset(PROGRAM), data, b, h, pos_first, pos_last, key_first, key_last
            )
    return some, every


@triton.jit
def _closed_form(PROGRAM: tl.constexpr, header, data, b, h, pos_first, pos_last, key_first, key_last):
    """(some, every) of positions pos_first .. pos_last and keys key_first .. key_last."""
    kind: tl.constexpr = root(PROGRAM)
    nearest, furthest = pos_first - key_last, pos_last - key_first  # every distance between the two occurs
    number = tl.load(header)
    if kind == "band":
        high = tl.load(header + 1)
        some = tl.maximum(number, nearest) <= tl.minimum(high, furthest)
        every = (number <= nearest) & (furthest <= high)
    elif kind == "prefix":
        count = prefix(PROGRAM, header, data, b)
        some, every = key_first < count, key_last < count
    elif kind == "global":
        some, every = (pos_first < number) | (key_first < number), (pos_last < number) | (key_last < number)
    elif kind == "dilated":
        some = furthest - (furthest % number + number) % number >= nearest  # % has the sign of the dividend
        every = some & ((furthest == nearest) | (number == 1))
    elif kind == "strided":
        some = (key_last + 1) - (key_last + 1) % number > key_first
        every = some & ((key_first == key_last) | (number == 1))
    else:
        tl.static_assert(kind == "block", "a leaf of another name")
        some, every = _block(table(PROGRAM, header, data, b, h), header, pos_first, pos_last, key_first, key_last)
    return some, every


@triton.jit
def _block(bits, header, pos_first, pos_last, key_first, key_last):
    """(some, every) of the table cells under a pair of tiles, 32 cells of a row at a time."""
    size_q, size_k, rows, columns = tl.load(header), tl.load(header + 1), tl.load(header + 2), tl.load(header + 3)
    r0, r1 = tl.maximum(pos_first, 0) // size_q, tl.minimum(pos_last // size_q, rows - 1)
    c0, c1 = key_first // size_k, tl.minimum(key_last // size_k, columns - 1)
    some = (pos_first + key_first) * 0  # int32, because a loop variable keeps its type
    every = ((pos_first >= 0) & (pos_last < rows * size_q) & (key_last < columns * size_k)).to(tl.int32) + some
    height, width = _most(r1 - r0), _most(c1 // 32 - c0 // 32)
    for down in range(height + 1):
        row = r0 + down
        for right in range(width + 1):
            word = c0 // 32 + right
            low, high = tl.maximum(c0 - word * 32, 0), tl.minimum(c1 - word * 32, 31)
            in_range = (row <= r1) & (low <= high) & (pos_last >= 0)
            loaded = tl.load(bits + row * words_of_row(header) + word, mask=in_range, other=0).to(
                tl.uint32, bitcast=True
            )
            # bits low .. high of the word
            bit_mask = (tl.full((), 0xFFFFFFFF, tl.uint32) << tl.where(in_range, low, 0).to(tl.uint32)) & (
                tl.full((), 0xFFFFFFFF, tl.uint32) >> tl.where(in_range, 31 - high, 0).to(tl.uint32)
            )
            some |= (in_range & ((loaded & bit_mask) != 0)).to(tl.int32)
            every &= (~in_range | ((loaded & bit_mask) == bit_mask)).to(tl.int32)
    return some != 0, every != 0


@triton.jit
def _most(x):
    """The maximum of a vector, or a scalar itself."""
    if x.type.is_block():
        x = tl.max(x, 0)
    return x


@triton.jit(do_not_specialize=["S_q", "S_k", "tiles_q", "tiles_k", "block_m", "block_n"])
def _table_kernel(
    counts, indices, data, bounds,  # counts: (B, H, rows, 2)   indices: (B, H, rows, others)
    S_q, S_k, tiles_q, tiles_k, block_m, block_n,
    PROGRAM: tl.constexpr, BY_KEY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row_tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column_tiles = tiles_q if BY_KEY else tiles_k
    row = (b * tl.num_programs(1) + h) * tl.num_programs(0) + row_tile
    indices += row.to(tl.int64) * column_tiles
    partials = 0
    for start in range(0, column_tiles, CHUNK):
        partial, _, _ = _chunk(
            PROGRAM, data, bounds, b, h, row_tile, start, S_q, S_k, tiles_q, tiles_k, block_m, block_n, BY_KEY, CHUNK
        )
        partials += tl.sum(partial, 0)
    at_partial, at_full = 0, partials
    for start in range(0, column_tiles, CHUNK):
        partial, full, tile = _chunk(
            PROGRAM, data, bounds, b, h, row_tile, start, S_q, S_k, tiles_q, tiles_k, block_m, block_n, BY_KEY, CHUNK
        )
        number = tile.to(indices.dtype.element_ty)
        tl.store(indices + at_partial + tl.cumsum(partial, 0) - 1, number, mask=partial != 0)
        tl.store(indices + at_full + tl.cumsum(full, 0) - 1, number, mask=full != 0)
        at_partial += tl.sum(partial, 0)
        at_full += tl.sum(full, 0)
    tl.store(counts + 2 * row, partials)
    tl.store(counts + 2 * row + 1, at_full - partials)


@triton.jit
def _chunk(
    PROGRAM: tl.constexpr, data, bounds, b, h, row_tile, start, S_q, S_k, tiles_q, tiles_k, block_m, block_n,
    BY_KEY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(partial, full, number) of the CHUNK tiles from `start` on, int32."""
    tile = start + tl.arange(0, CHUNK)
    nonempty = tile < (tiles_q if BY_KEY else tiles_k)
    other = tl.where(nonempty, tile, 0)  # loads need no mask
    q, k = (other, row_tile) if BY_KEY else (row_tile, other)
    some, every = _states(
        PROGRAM, PROGRAM, data, bounds, b, h, q, k, S_q, S_k, tiles_q, tiles_k, block_m, block_n
    )  # fmt: skip
    every &= k * block_n + block_n <= S_k
    return (nonempty & some & ~every).to(tl.int32), (nonempty & every).to(tl.int32), tile


_bounds = TritonKernel(_bounds_kernel)
_table = TritonKernel(_table_kernel)


def build(program: str, data: Tensor, sizes: Sizes, axis: str) -> TileTable:
    """`tile_table_of` with kernels; may be called inside a launch."""
    batch, heads = _program.extent(program, sizes.batch, sizes.heads)
    tiles_q, tiles_k = sizes.tiles
    rows, column_tiles = (tiles_k, tiles_q) if axis == "key" else (tiles_q, tiles_k)
    counts = scratch((batch, heads, rows, 2), torch.int32, data.device)
    indices = scratch((batch, heads, rows, column_tiles), index_dtype(column_tiles), data.device)
    numbers = (sizes.s_q, sizes.s_k, tiles_q, tiles_k, sizes.block_m, sizes.block_n)
    bounds = data
    if count := _program.document_count(program):
        bounds = scratch((count, batch, tiles_q + tiles_k, 2), torch.int32, data.device)
        block = triton.next_power_of_2(max(sizes.block_m, sizes.block_n))
        _bounds((tiles_q + tiles_k, batch), (bounds, data, *numbers), (program, block), num_warps=1)
    _table(
        (rows, heads, batch), (counts, indices, data, bounds, *numbers), (program, axis == "key", CHUNK), num_warps=8
    )
    return TileTable(counts, indices)
