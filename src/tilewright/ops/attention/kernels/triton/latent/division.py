"""Division of latent attention over a KV cache among programs, computed by each of them from the lengths.

The rows of a sequence (tokens times heads, the head fastest) are cut into row tiles, its keys into key tiles.  The key
tiles of all sequences stand in one line, which is cut into equal shares, one for each `part`.  So a program has a few
segments, each some key tiles of one sequence; all row tiles are cut in the same places, and those of a share run at the
same time and read the L2.

A segment that is not a whole sequence leaves a partial result.  A share has at most two: one that continues a sequence,
in slot 2 * part, and one that begins one, in slot 2 * part + 1.

FIXED: a sequence is cut by its own length, into at most SPLITS segments; part b * SPLITS + i is its segment i.
"""

import triton
import triton.language as tl


@triton.jit
def keys_of(lengths, b, B, tokens_each, capacity):
    """Keys of sequence b, a number or several; tokens_each of them share a length, without `lengths` the capacity."""
    if lengths is None:
        n = tl.where(b < B, capacity, 0)
    else:
        n = tl.minimum(tl.maximum(tl.load(lengths + b // tokens_each, mask=b < B, other=0), 0), capacity)
    return n


@triton.jit
def line(
    lengths, B, tokens_each, capacity, parts,
    LEAST: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(begin, end, share): where the key tiles of each sequence lie in the line, and how many a share has.

    A sequence without keys has one key tile, so that somebody writes its results.
    """
    b = tl.arange(0, BLOCK_B)
    tiles = tl.maximum(tl.cdiv(keys_of(lengths, b, B, tokens_each, capacity), BLOCK_N), 1)
    size = tl.where(b < B, tiles, 0)
    end = tl.cumsum(size)
    share = tl.maximum(tl.cdiv(tl.sum(size), parts), LEAST)
    return end - size, end, share


@triton.jit
def cut(keys, SPLITS: tl.constexpr, LEAST: tl.constexpr, BLOCK_N: tl.constexpr):
    """(key tiles, key tiles of a segment) of a sequence that its own length divides."""
    tiles = tl.maximum(tl.cdiv(keys, BLOCK_N), 1)
    return tiles, tl.cdiv(tiles, tl.minimum(tl.cdiv(tiles, LEAST), SPLITS))
