"""A mask program inside a Triton kernel: `allowed` is unrolled for one text at compile time; numbers come from memory.

Only partial tiles evaluate it.  Loads are per row and per column, so they cost little compared with the tile.  The
layout of the numbers is in `mask.program`.
"""

import triton
import triton.language as tl

from tilewright.mask import program as _program

root = triton.constexpr_function(_program.root)
offset = triton.constexpr_function(_program.offset)
flags = triton.constexpr_function(_program.flags)
first = triton.constexpr_function(_program.first)
second = triton.constexpr_function(_program.second)


@triton.jit
def allowed(program: tl.constexpr, data, b, h, positions, keys):
    """Bool tile: True where the query at a position sees the key.

    program: text of `Mask.program`, not empty.  data: pointer to its int32.  b, h: batch and query head.  positions:
    (M, 1) int32, i + S_k - S_q, keys: (1, N) int32; or (1, M) and (N, 1) for a transposed tile.  Positions and keys
    outside the sequence are safe; the kernel itself masks keys from S_k on.
    """
    result, _ = tl.broadcast(_node(program, data, b, h, positions, keys), positions == keys)
    return result


@triton.jit
def _node(program: tl.constexpr, data, b, h, positions, keys):
    """`allowed` before the broadcast to the tile."""
    kind: tl.constexpr = root(program)
    if kind == "&":
        left = _node(first(program), data, b, h, positions, keys)
        result = left & _node(second(program), data, b, h, positions, keys)
    elif kind == "|":
        left = _node(first(program), data, b, h, positions, keys)
        result = left | _node(second(program), data, b, h, positions, keys)
    elif kind == "~":
        result = ~_node(second(program), data, b, h, positions, keys)
    else:
        result = _leaf(program, data + offset(program), data, b, h, positions, keys)
    return result


@triton.jit
def _leaf(program: tl.constexpr, header, data, b, h, positions, keys):
    kind: tl.constexpr = root(program)
    leaf_flags: tl.constexpr = flags(program)
    if kind == "band":
        distance = positions - keys
        result = (distance >= tl.load(header)) & (distance <= tl.load(header + 1))
    elif kind == "doc":
        length = tl.load(header)
        ids = data + tl.load(header + 1)
        if leaf_flags == "b":
            ids += b * length
        inside_q, inside_k = (positions >= 0) & (positions < length), (keys >= 0) & (keys < length)
        query_ids = tl.load(ids + positions, mask=inside_q, other=0)
        result = (query_ids == tl.load(ids + keys, mask=inside_k, other=0)) & inside_q & inside_k
    elif kind == "seq":
        length = tl.load(header)
        queries = positions - tl.load(header + 1)
        bounds = data + tl.load(header + 2) + queries
        if leaf_flags == "b":
            bounds += b * 3 * length
        inside = (queries >= 0) & (queries < length)
        result = keys >= tl.load(bounds, mask=inside, other=0)
        result &= keys < tl.load(bounds + length, mask=inside, other=0)
    elif kind == "prefix":
        result = keys < prefix(program, header, data, b)
    elif kind == "global":
        count = tl.load(header)
        result = (positions < count) | (keys < count)
    elif kind == "dilated":
        step = tl.load(header)  # divide per row and per column, not per score; positions may be negative
        result = (positions % step + step) % step == keys % step
    elif kind == "strided":
        result = (keys + 1) % tl.load(header) == 0
    else:
        tl.static_assert(kind == "block", "a leaf of another name")
        row, column = positions // tl.load(header), keys // tl.load(header + 1)
        inside_q = (positions >= 0) & (row < tl.load(header + 2))
        inside_k = (keys >= 0) & (column < tl.load(header + 3))
        words = table(program, header, data, b, h) + row * words_of_row(header) + column // 32
        bits = tl.load(words, mask=inside_q & inside_k, other=0)
        result = ((bits >> (column % 32)) & 1) == 1
    return result


@triton.jit
def prefix(program: tl.constexpr, header, data, b):
    """Prefix length of batch b."""
    leaf_flags: tl.constexpr = flags(program)
    count = tl.load(header)
    if leaf_flags == "t":
        count = tl.load(data + count)
    if leaf_flags == "b":
        count = tl.load(data + count + b)
    return count


@triton.jit
def words_of_row(header):
    """int32 words per row of a block table."""
    return (tl.load(header + 3) + 31) // 32


@triton.jit
def table(program: tl.constexpr, header, data, b, h):
    """Pointer to the block table of batch b and head h."""
    leaf_flags: tl.constexpr = flags(program)
    size = tl.load(header + 2) * words_of_row(header)
    bits = data + tl.load(header + 5)
    if leaf_flags == "b" or leaf_flags == "bh":
        bits += b * tl.load(header + 4) * size
    if leaf_flags == "h" or leaf_flags == "bh":
        bits += h * size
    return bits
