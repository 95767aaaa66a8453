"""What the Triton kernels of attention share: rows of an operand, scores with their terms, and what a mask allows.

Scores are kept in base 2, so that a softmax is one exp2 an element: s2 = log2(e) * s.  A head dimension is computed as
two parts, a power of two and the power of two that covers the rest (80 = 64 + 16): `triton_tiles.parts`.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from tilewright.mask.triton_program import allowed

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def place(pid, tiles, heads, chunk, DESCENDING: tl.constexpr):
    """-> tile, head of all batches; `chunk` heads are worked on together: their keys and values fit in L2.

    DESCENDING: the last tiles, which see most keys under causality, are started first.
    """
    first = pid // (chunk * tiles) * chunk
    width = tl.minimum(heads - first, chunk)
    inside = pid - first * tiles
    tile = inside // width
    if DESCENDING:
        tile = tiles - 1 - tile
    return tile, first + inside % width


@triton.jit
def describe(t, B, H, S, stride_b, stride_h, stride_s, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A descriptor of t (B, H, S, DIM) that copies (BLOCK, WIDTH) of one head."""
    return tl.make_tensor_descriptor(t, [B, H, S, DIM], [stride_b, stride_h, stride_s, 1], [1, 1, BLOCK, WIDTH])


@triton.jit
def rows(
    at, descriptor, b, h, start, total, stride, COLUMN: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """(BLOCK, WIDTH): rows from `start` and columns from COLUMN of one head's (total, DIM); zeros beyond DIM.

    Rows beyond `total` repeat the last one, or are zeros where a descriptor is read: finite if the operand is.
    """
    if DESCRIPTORS:
        x = descriptor.load([b, h, start, COLUMN]).reshape(BLOCK, WIDTH)
    else:
        offs = tl.minimum(start + tl.arange(0, BLOCK), total - 1).to(tl.int64)
        columns = COLUMN + tl.arange(0, WIDTH)
        places = at + (offs[:, None] * stride + columns[None, :])
        if COLUMN + WIDTH > DIM:
            x = tl.load(places, mask=columns[None, :] < DIM, other=0.0)
        else:
            x = tl.load(places)
    return x


@triton.jit
def store_rows(at, value, start, total, stride, COLUMN: tl.constexpr, DIM: tl.constexpr):
    """Writes what lies inside (total, DIM) of `value` (BLOCK, WIDTH)."""
    offs = start + tl.arange(0, value.shape[0])
    columns = COLUMN + tl.arange(0, value.shape[1])
    inside = (offs < total)[:, None]
    if COLUMN + value.shape[1] > DIM:
        inside = inside & (columns < DIM)[None, :]
    places = at + (offs.to(tl.int64)[:, None] * stride + columns[None, :])
    tl.store(places, value.to(at.dtype.element_ty), mask=inside)


@triton.jit
def transformed(
    s, positions, keys, scale, softcap, slope, SOFTCAP: tl.constexpr, SLOPES: tl.constexpr
):  # -> scores in base 2, and those before ALiBi
    """positions and keys: broadcastable to s, which is q k^T."""
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + e^2x)
        grown = tl.exp2(s * (scale / softcap * (2.0 * LOG2E)))
        s = softcap * LOG2E * (1.0 - 2.0 / (1.0 + grown))
    else:
        s = s * (scale * LOG2E)
    capped = s
    if SLOPES:
        s -= slope * LOG2E * tl.abs(positions - keys).to(tl.float32)
    return s, capped


@triton.jit
def visible(
    positions, keys, S_k, left, right, data, b, h, LEFT: tl.constexpr, RIGHT: tl.constexpr, PROGRAM: tl.constexpr
):
    """bool: may the query at a position see a key?  positions (M, 1), keys (1, N), or (1, M) and (N, 1)."""
    end = S_k
    if RIGHT:
        end = tl.minimum(positions + right + 1, S_k)
    if LEFT:  # both bounds in one comparison of numbers without a sign
        begin = positions - left
        result = (keys - begin).to(tl.uint32, bitcast=True) < tl.maximum(end - begin, 0).to(tl.uint32, bitcast=True)
    else:
        result = keys < end
    if PROGRAM != "":
        result = result & allowed(PROGRAM, data, b, h, positions, keys)
    return result


@triton.jit
def keys_of_tile(p0, p1, S_k, left, right, BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Of queries at positions p0 .. p1: the first and the end of the key tiles they may see, and of those that each
    of them sees whole.
    """
    begin, end, whole_from, whole_to = 0, S_k, 0, S_k
    if RIGHT:
        end = tl.maximum(tl.minimum(S_k, p1 + right + 1), 0)
        whole_to = tl.maximum(tl.minimum(S_k, p0 + right + 1), 0)
    if LEFT:
        begin = tl.maximum(p0 - left, 0)
        whole_from = tl.maximum(p1 - left, 0)
    return begin // BLOCK, tl.cdiv(end, BLOCK), tl.cdiv(whole_from, BLOCK), whole_to // BLOCK


@triton.jit
def queries_of_tile(j0, j1, S_q, S_k, left, right, BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Of keys j0 .. j1: the first and the end of the query tiles that may see them, and of those that see all of them.

    The last tile counts as whole where it hangs over S_q: rows that are not there have lse = +inf.
    """
    begin, end, whole_from, whole_to = 0, S_q, 0, tl.cdiv(S_q, BLOCK)
    if RIGHT:
        begin = tl.maximum(j0 - right - (S_k - S_q), 0)
        whole_from = tl.maximum(j1 - right - (S_k - S_q), 0)
    if LEFT:
        end = tl.maximum(tl.minimum(S_q, j1 + left - (S_k - S_q) + 1), 0)
        seen = j0 + left - (S_k - S_q) + 1
        whole_to = tl.where(seen >= S_q, whole_to, tl.maximum(seen, 0) // BLOCK)
    return begin // BLOCK, tl.cdiv(end, BLOCK), tl.cdiv(whole_from, BLOCK), whole_to
