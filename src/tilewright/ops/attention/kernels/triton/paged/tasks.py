"""Division of attention over a KV cache among programs, computed by each of them from the lengths.

The query rows of a sequence (tokens times heads of a group, the head fastest) are cut into row tiles of BLOCK_M, the
keys that such a tile sees into `chunks`.  A task is a chunk of a row tile; tasks are numbered sequence by sequence, so
a program finds its own by a prefix sum over sequences.  Row tiles with several chunks leave partial results, numbered
in the same way, which a second kernel combines.

By default a chunk is as long as gives all tasks together the number that fills the GPU: long and short sequences are
cut into chunks of one length.  FIXED: the number of chunks depends on the sequence alone.  Tokens behind the last
sequence are one more, without keys.
"""

import triton
import triton.language as tl

ALL, FEW, MANY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def sequence_bounds(cu_seqlens, b, B, T, S_Q: tl.constexpr):
    """(first token, end) of sequence b, a number or several; B is that of the tokens behind the last one."""
    if S_Q > 0:
        begin = b * S_Q
        end = tl.where(b < B, begin + S_Q, begin)
    else:
        begin = tl.minimum(tl.load(cu_seqlens + b, mask=b <= B, other=T), T)
        end = tl.minimum(tl.load(cu_seqlens + b + 1, mask=b < B, other=T), T)
    return begin, tl.maximum(end, begin)


@triton.jit
def sequence_length(lengths, b, B, capacity):
    """Keys of sequence b, a number or several: at most what its pages hold."""
    return tl.minimum(tl.maximum(tl.load(lengths + b, mask=b < B, other=0), 0), capacity)


@triton.jit
def divide(
    lengths, cu_seqlens, B, T, capacity, left, enough, most,
    S_Q: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, FEW_ROWS: tl.constexpr,
    LEFT: tl.constexpr, FIXED: tl.constexpr, LEAST: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(row tiles, chunks) of each sequence, (BLOCK_B,).

    FORM: FEW and MANY count the sequences of at most and of more than FEW_ROWS rows; the others have no row tiles.
    enough: tasks that fill the GPU once; a chunk has LEAST key tiles even if that makes fewer than `most` tasks, and
    less only if it makes fewer than `enough`.   FIXED: LEAST key tiles a chunk, at most `most` chunks.
    """
    b = tl.arange(0, BLOCK_B)
    begin, end = sequence_bounds(cu_seqlens, b, B, T, S_Q)
    keys = sequence_length(lengths, b, B, capacity)
    rows = (end - begin) * GROUP
    row_tiles = tl.cdiv(rows, BLOCK_M)
    if FORM == FEW:
        row_tiles = tl.where(rows <= FEW_ROWS, row_tiles, 0)
    if FORM == MANY:
        row_tiles = tl.where(rows > FEW_ROWS, row_tiles, 0)
    if LEFT:  # at most BLOCK_M tokens of a row tile, and a key tile that begins before the window
        keys = tl.minimum(keys, left + BLOCK_M + BLOCK_N)
    key_tiles = tl.maximum(tl.cdiv(keys, BLOCK_N), 1)
    if FIXED:
        chunks = tl.minimum(tl.cdiv(key_tiles, LEAST), most)
    else:
        total = tl.sum(row_tiles * key_tiles)
        chunk = tl.maximum(tl.minimum(tl.cdiv(total, enough), LEAST), tl.cdiv(total, most))
        chunks = tl.cdiv(key_tiles, tl.maximum(chunk, 1))
    return row_tiles, chunks
