"""Tables of tiles on the GPU: the closed forms of `classify`, written as lists for kernels.

Documents first: one program a tile finds the least and largest id in it, reading the ids twice (once as tiles of
queries, once of keys): 1 MB at 131072 tokens; of packed sequences, by binary search, which queries may see a tile of
keys.  Then one program a row of the table classifies CHUNK tiles at a time,
once to count the partial ones, which come first in the list, and once to write; at 1024 x 1024 tiles it writes 2 MB.
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

CHUNK = 1024  # tiles at a time: all of them up to 131072 tokens in tiles of 128

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
    of_query = tile < tiles_q
    start = tl.where(of_query, tile * block_m, (tile - tiles_q) * block_n)
    end = tl.where(of_query, tl.minimum(start + block_m, S_q), tl.minimum(start + block_n, S_k))
    places = start + tl.arange(0, BLOCK)
    inside = places < end
    places += tl.where(of_query, S_k - S_q, 0)
    inside &= places >= 0
    for n in tl.static_range(document_count(PROGRAM)):
        to = bounds + 2 * ((n * tl.num_programs(1) + b) * tl.num_programs(0) + tile)
        if root(document(PROGRAM, n)) == "seq":
            firsts = data + tl.load(data + offset(document(PROGRAM, n)) + 2)
            queries = tl.where(of_query, 0, S_q)  # tiles of queries need no search
            tl.store(to, _count_below(firsts + S_q, queries, start + 1))
            tl.store(to + 1, _count_below(firsts, queries, end) - 1)
        else:
            ids = data + tl.load(data + offset(document(PROGRAM, n)) + 1)
            if flags(document(PROGRAM, n)) == "b":
                ids += b * S_k
            found = tl.load(ids + places, mask=inside, other=0)
            tl.store(to, tl.min(tl.where(inside, found, _MOST), 0))
            tl.store(to + 1, tl.max(tl.where(inside, found, _LEAST), 0))


@triton.jit
def _count_below(numbers, count, limit):
    """How many of `numbers` (count,), which never decrease, are below `limit`."""
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
    """(some, every) of tiles q and k, one of them a number and the other a vector."""
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
        p0, p1 = q * block_m + S_k - S_q, tl.minimum(q * block_m + block_m, S_q) - 1 + S_k - S_q
        j0, j1 = k * block_n, tl.minimum(k * block_n + block_n, S_k) - 1
        if kind == "doc":
            tiles = tiles_q + tiles_k
            of: tl.constexpr = flags(PROGRAM)
            row = bounds + 2 * document_number(WHOLE, PROGRAM) * tl.num_programs(2) * tiles
            if of == "b":
                row += 2 * b * tiles
            low_q, high_q = tl.load(row + 2 * q), tl.load(row + 2 * q + 1)
            low_k, high_k = tl.load(row + 2 * (tiles_q + k)), tl.load(row + 2 * (tiles_q + k) + 1)
            some = tl.maximum(low_q, low_k) <= tl.minimum(high_q, high_k)
            every = (low_q == high_q) & (low_k == high_k) & (low_q == low_k) & (p0 >= 0)
        elif kind == "seq":
            firsts = data + tl.load(data + offset(PROGRAM) + 2)
            ends, counts = firsts + S_q, firsts + 2 * S_q
            tiles = tiles_q + tiles_k
            row = bounds + 2 * (document_number(WHOLE, PROGRAM) * tl.num_programs(2) * tiles + tiles_q + k)
            i0, i1 = q * block_m, tl.minimum(q * block_m + block_m, S_q) - 1
            a, z = tl.maximum(i0, tl.load(row)), tl.minimum(i1, tl.load(row + 1))
            there = a <= z
            a, z = tl.minimum(a, S_q - 1), tl.maximum(z, 0)
            some = (tl.load(firsts + a) < tl.load(ends + a)) | (tl.load(counts + a) < tl.load(counts + z))
            some &= there
            every = (tl.load(firsts + i1) <= j0) & (tl.load(ends + i0) > j1)
        else:
            some, every = _closed_form(PROGRAM, data + offset(PROGRAM), data, b, h, p0, p1, j0, j1)
    return some, every


@triton.jit
def _closed_form(PROGRAM: tl.constexpr, header, data, b, h, p0, p1, j0, j1):
    """(some, every) of positions p0 .. p1 and keys j0 .. j1."""
    kind: tl.constexpr = root(PROGRAM)
    nearest, furthest = p0 - j1, p1 - j0  # every distance between them occurs
    number = tl.load(header)
    if kind == "band":
        high = tl.load(header + 1)
        some = tl.maximum(number, nearest) <= tl.minimum(high, furthest)
        every = (number <= nearest) & (furthest <= high)
    elif kind == "prefix":
        count = prefix(PROGRAM, header, data, b)
        some, every = j0 < count, j1 < count
    elif kind == "global":
        some, every = (p0 < number) | (j0 < number), (p1 < number) | (j1 < number)
    elif kind == "dilated":
        some = furthest - (furthest % number + number) % number >= nearest  # % takes the sign of what is divided
        every = some & ((furthest == nearest) | (number == 1))
    elif kind == "strided":
        some = (j1 + 1) - (j1 + 1) % number > j0
        every = some & ((j0 == j1) | (number == 1))
    else:
        tl.static_assert(kind == "block", "a leaf of another name")
        some, every = _block(table(PROGRAM, header, data, b, h), header, p0, p1, j0, j1)
    return some, every


@triton.jit
def _block(bits, header, p0, p1, j0, j1):
    """(some, every) of the cells under a pair of tiles: 32 of a row at a time."""
    size_q, size_k, rows, columns = tl.load(header), tl.load(header + 1), tl.load(header + 2), tl.load(header + 3)
    r0, r1 = tl.maximum(p0, 0) // size_q, tl.minimum(p1 // size_q, rows - 1)
    c0, c1 = j0 // size_k, tl.minimum(j1 // size_k, columns - 1)
    some = (p0 + j0) * 0  # as int32: what a loop carries has one type
    every = ((p0 >= 0) & (p1 < rows * size_q) & (j1 < columns * size_k)).to(tl.int32) + some
    height, width = _most(r1 - r0), _most(c1 // 32 - c0 // 32)
    for down in range(height + 1):
        row = r0 + down
        for right in range(width + 1):
            word = c0 // 32 + right
            low, high = tl.maximum(c0 - word * 32, 0), tl.minimum(c1 - word * 32, 31)
            here = (row <= r1) & (low <= high) & (p1 >= 0)
            found = tl.load(bits + row * words_of_row(header) + word, mask=here, other=0).to(tl.uint32, bitcast=True)
            # bits low .. high of the word
            wanted = (tl.full((), 0xFFFFFFFF, tl.uint32) << tl.where(here, low, 0).to(tl.uint32)) & (
                tl.full((), 0xFFFFFFFF, tl.uint32) >> tl.where(here, 31 - high, 0).to(tl.uint32)
            )
            some |= (here & ((found & wanted) != 0)).to(tl.int32)
            every &= (~here | ((found & wanted) == wanted)).to(tl.int32)
    return some != 0, every != 0


@triton.jit
def _most(x):
    """The largest of a vector, or a number itself."""
    if x.type.is_block():
        x = tl.max(x, 0)
    return x


@triton.jit(do_not_specialize=["S_q", "S_k", "tiles_q", "tiles_k", "block_m", "block_n"])
def _table_kernel(
    counts, indices, data, bounds,  # counts: (B, H, rows, 2)   indices: (B, H, rows, others)
    S_q, S_k, tiles_q, tiles_k, block_m, block_n,
    PROGRAM: tl.constexpr, BY_KEY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    own, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    others = tiles_q if BY_KEY else tiles_k
    row = (b * tl.num_programs(1) + h) * tl.num_programs(0) + own
    indices += row.to(tl.int64) * others
    partials = 0
    for start in range(0, others, CHUNK):
        partial, _, _ = _chunk(
            PROGRAM, data, bounds, b, h, own, start, S_q, S_k, tiles_q, tiles_k, block_m, block_n, BY_KEY, CHUNK
        )
        partials += tl.sum(partial, 0)
    at_partial, at_full = 0, partials
    for start in range(0, others, CHUNK):
        partial, full, tile = _chunk(
            PROGRAM, data, bounds, b, h, own, start, S_q, S_k, tiles_q, tiles_k, block_m, block_n, BY_KEY, CHUNK
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
    PROGRAM: tl.constexpr, data, bounds, b, h, own, start, S_q, S_k, tiles_q, tiles_k, block_m, block_n,
    BY_KEY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Which of the tiles from `start` on are partial, which full, as int32; and their numbers."""
    tile = start + tl.arange(0, CHUNK)
    there = tile < (tiles_q if BY_KEY else tiles_k)
    other = tl.where(there, tile, 0)  # loads need no mask
    q, k = (other, own) if BY_KEY else (own, other)
    some, every = _states(
        PROGRAM, PROGRAM, data, bounds, b, h, q, k, S_q, S_k, tiles_q, tiles_k, block_m, block_n
    )  # fmt: skip
    every &= k * block_n + block_n <= S_k
    return (there & some & ~every).to(tl.int32), (there & every).to(tl.int32), tile


_bounds = TritonKernel(_bounds_kernel)
_table = TritonKernel(_table_kernel)


def build(program: str, data: Tensor, sizes: Sizes, by: str) -> TileTable:
    """`tile_table_of` by kernels; may be called inside a launch."""
    batch, heads = _program.extent(program, sizes.batch, sizes.heads)
    tiles_q, tiles_k = sizes.tiles
    rows, others = (tiles_k, tiles_q) if by == "key" else (tiles_q, tiles_k)
    counts = scratch((batch, heads, rows, 2), torch.int32, data.device)
    indices = scratch((batch, heads, rows, others), index_dtype(others), data.device)
    numbers = (sizes.s_q, sizes.s_k, tiles_q, tiles_k, sizes.block_m, sizes.block_n)
    bounds = data
    if count := _program.document_count(program):
        bounds = scratch((count, batch, tiles_q + tiles_k, 2), torch.int32, data.device)
        block = triton.next_power_of_2(max(sizes.block_m, sizes.block_n))
        _bounds((tiles_q + tiles_k, batch), (bounds, data, *numbers), (program, block), num_warps=1)
    _table((rows, heads, batch), (counts, indices, data, bounds, *numbers), (program, by == "key", CHUNK), num_warps=8)
    return TileTable(counts, indices)
