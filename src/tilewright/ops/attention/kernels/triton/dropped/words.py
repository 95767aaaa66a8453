"""Which probabilities stay under dropout, on the device: the function of `ops/attention/dropped.py`.

One evaluation of Philox gives the words of four scores: of queries i and i + 8, and keys j and j + 8.  The tiles of
MMA and WGMMA have these four in one thread, also in their transpose, so no word is moved between threads.
"""

import triton
import triton.language as tl


@triton.jit
def head_stream(seed, offset, b, h):
    """(key, c2, c3): the random numbers of one head.   seed, offset: pointers to int64; offset None: 0."""
    low, high = (b * 0).to(tl.uint32), (b * 0).to(tl.uint32)
    if offset is not None:
        number = tl.load(offset)
        low, high = (number & 0xFFFFFFFF).to(tl.uint32), ((number >> 32) & 0xFFFFFFFF).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(tl.load(seed), b.to(tl.uint32), h.to(tl.uint32), low, high)
    return r0.to(tl.uint64) | (r1.to(tl.uint64) << 32), r2, r3


@triton.jit
def kept(
    key, c2, c3, last, first_row, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROWS_ARE_KEYS: tl.constexpr
):
    """Bool (ROWS, COLUMNS): which scores of a tile stay, those of queries first_row + r and keys first_column + c; or
    of keys first_row + r and queries first_column + c.  Both begin at multiples of 16.
    """
    # Of every 16 rows and columns the first 8, whose bit 3 is 0
    offs_r, offs_c = tl.arange(0, ROWS // 2), tl.arange(0, COLUMNS // 2)
    row = first_row + offs_r // 8 * 16 + offs_r % 8
    column = first_column + offs_c // 8 * 16 + offs_c % 8
    row = tl.broadcast_to(row[:, None], (ROWS // 2, COLUMNS // 2)).to(tl.uint32)
    column = tl.broadcast_to(column[None, :], (ROWS // 2, COLUMNS // 2)).to(tl.uint32)
    c2, c3 = tl.zeros_like(row) + c2, tl.zeros_like(row) + c3
    if ROWS_ARE_KEYS:
        w00, w10, w01, w11 = tl.philox(key, row, column, c2, c3)
    else:
        w00, w01, w10, w11 = tl.philox(key, column, row, c2, c3)
    words = tl.join(tl.join(w00, w01), tl.join(w10, w11))  # (.., .., bit 3 of the column, bit 3 of the row)
    words = tl.reshape(words, (ROWS // 16, 8, COLUMNS // 16, 8, 2, 2))
    words = tl.reshape(tl.permute(words, (0, 5, 1, 2, 4, 3)), (ROWS, COLUMNS))
    return (words >> 1).to(tl.int32) > last
