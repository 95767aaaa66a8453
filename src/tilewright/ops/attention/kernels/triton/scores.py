"""Shared by the Triton kernels of attention: loads and stores of rows, softcap and ALiBi of scores, the mask, dropout.

Scores are in units of log2, so that the softmax is one exp2 per element: s2 = log2(e) * s.  A head dimension is split
into two parts, a power of two and the power of two that covers the rest (80 = 64 + 16): `triton_tiles.parts`.
"""

import triton
import triton.language as tl

from tilewright.mask.triton_program import allowed

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def schedule_tile(pid, tiles, heads, chunk, DESCENDING: tl.constexpr):
    """Tile and head (over all batches) of program `pid`: `chunk` heads run together, and their K and V stay in the L2.

    DESCENDING: start the last tiles first: under a causal mask they see most keys.
    """
    first = pid // (chunk * tiles) * chunk
    width = tl.minimum(heads - first, chunk)
    local = pid - first * tiles
    tile = local // width
    if DESCENDING:
        tile = tiles - 1 - tile
    return tile, first + local % width


@triton.jit
def describe(t, B, H, S, stride_b, stride_h, stride_s, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A descriptor of t (B, H, S, DIM) that copies (BLOCK, WIDTH) of one head."""
    return tl.make_tensor_descriptor(t, [B, H, S, DIM], [stride_b, stride_h, stride_s, 1], [1, 1, BLOCK, WIDTH])


@triton.jit
def load_rows(
    base, descriptor, b, h, start, total, stride, COLUMN: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Load (BLOCK, WIDTH): rows from `start` and columns from COLUMN of one head's (total, DIM); zeros beyond DIM.

    Rows beyond `total` repeat the last row, or are zeros through a descriptor: finite if the operand is.
    """
    if DESCRIPTORS:
        x = descriptor.load([b, h, start, COLUMN]).reshape(BLOCK, WIDTH)
    else:
        offs = tl.minimum(start + tl.arange(0, BLOCK), total - 1).to(tl.int64)
        columns = COLUMN + tl.arange(0, WIDTH)
        ptrs = base + (offs[:, None] * stride + columns[None, :])
        if COLUMN + WIDTH > DIM:
            x = tl.load(ptrs, mask=columns[None, :] < DIM, other=0.0)
        else:
            x = tl.load(ptrs)
    return x


@triton.jit
def store_rows(base, value, start, total, stride, COLUMN: tl.constexpr, DIM: tl.constexpr):
    """Store the part of `value` (BLOCK, WIDTH) that lies inside (total, DIM)."""
    offs = start + tl.arange(0, value.shape[0])
    columns = COLUMN + tl.arange(0, value.shape[1])
    in_range = (offs < total)[:, None]
    if COLUMN + value.shape[1] > DIM:
        in_range = in_range & (columns < DIM)[None, :]
    ptrs = base + (offs.to(tl.int64)[:, None] * stride + columns[None, :])
    tl.store(ptrs, value.to(base.dtype.element_ty), mask=in_range)


@triton.jit
def apply_softcap_alibi(s, positions, keys, scale, softcap, slope, SOFTCAP: tl.constexpr, SLOPES: tl.constexpr):
    """Scores in units of log2, and the same before ALiBi, of s = q k^T.  positions and keys broadcast to s."""
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + e^2x)
        e2x = tl.exp2(s * (scale / softcap * (2.0 * LOG2E)))
        s = softcap * LOG2E * (1.0 - 2.0 / (1.0 + e2x))
    else:
        s = s * (scale * LOG2E)
    capped = s
    if SLOPES:
        s -= slope * LOG2E * tl.abs(positions - keys).to(tl.float32)
    return s, capped


@triton.jit
def visible(
    positions, keys, S_k, left, right, mask_data, b, h, LEFT: tl.constexpr, RIGHT: tl.constexpr, PROGRAM: tl.constexpr
):
    """Bool mask: which keys the queries at `positions` see.  positions (M, 1), keys (1, N), or (1, M) and (N, 1)."""
    end = S_k
    if RIGHT:
        end = tl.minimum(positions + right + 1, S_k)
    if LEFT:  # both bounds in one unsigned comparison
        begin = positions - left
        result = (keys - begin).to(tl.uint32, bitcast=True) < tl.maximum(end - begin, 0).to(tl.uint32, bitcast=True)
    else:
        result = keys < end
    if PROGRAM != "":
        result = result & allowed(PROGRAM, mask_data, b, h, positions, keys)
    return result


@triton.jit
def keys_of_tile(pos_first, pos_last, S_k, left, right, BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """(first, end) of the key tiles that queries at positions pos_first .. pos_last see, then (first, end) of the full
    tiles: those of which every query sees every key.
    """
    begin, end, full_first, full_end = 0, S_k, 0, S_k
    if RIGHT:
        end = tl.maximum(tl.minimum(S_k, pos_last + right + 1), 0)
        full_end = tl.maximum(tl.minimum(S_k, pos_first + right + 1), 0)
    if LEFT:
        begin = tl.maximum(pos_first - left, 0)
        full_first = tl.maximum(pos_last - left, 0)
    return begin // BLOCK, tl.cdiv(end, BLOCK), tl.cdiv(full_first, BLOCK), full_end // BLOCK


@triton.jit
def queries_of_tile(
    key_first, key_last, S_q, S_k, left, right, BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):
    """(first, end) of the query tiles that see keys key_first .. key_last, then (first, end) of the full tiles: those
    of which every query sees all these keys.

    A last tile that extends beyond S_q counts as full: rows beyond S_q have lse = +inf.
    """
    begin, end, full_first, full_end = 0, S_q, 0, tl.cdiv(S_q, BLOCK)
    if RIGHT:
        begin = tl.maximum(key_first - right - (S_k - S_q), 0)
        full_first = tl.maximum(key_last - right - (S_k - S_q), 0)
    if LEFT:
        end = tl.maximum(tl.minimum(S_q, key_last + left - (S_k - S_q) + 1), 0)
        last_full = key_first + left - (S_k - S_q) + 1
        full_end = tl.where(last_full >= S_q, full_end, tl.maximum(last_full, 0) // BLOCK)
    return begin // BLOCK, tl.cdiv(end, BLOCK), tl.cdiv(full_first, BLOCK), full_end


@triton.jit
def head_stream(seed, offset, b, h):
    """(key, c2, c3): the random numbers of one head, as `ops/attention/dropped.py` has them.

    seed, offset: pointers to int64; offset None: 0.
    """
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

    One evaluation of Philox gives the words of four scores: of queries i and i + 8, and keys j and j + 8.  The tiles of
    MMA and WGMMA have these four in one thread, also in their transpose, so no word is moved between threads.
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
