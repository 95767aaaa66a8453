"""The second kernel of latent attention over a KV cache: it joins the segments of a sequence that has several.

A program has one row, and reads CHUNKS segments of it at a time, always in the order of the keys.
"""

import triton
import triton.language as tl

from tilewright.ops.attention.kernels.triton.latent.division import cut, keys_of, line
from tilewright.ops.attention.kernels.triton.paged.attend import finish
from tilewright.ops.attention.kernels.triton.paged.combine import joined
from tilewright.ops.attention.kernels.triton.scores import MINUS_INFINITY


@triton.jit
def combine_kernel(
    partial_acc, partial_stat, o, lse, lengths, sinks,
    B, tokens_each, capacity, row_tiles, parts,
    S_Q: tl.constexpr, H: tl.constexpr, D_V: tl.constexpr, WIDTH: tl.constexpr, DEPENDENT: tl.constexpr,
    FIXED: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Arguments as in `attend_kernel`; lengths are those that it read.  Program (i, r): row r of the i-th sequence of
    several segments; FIXED: of sequence i.
    """
    row = tl.program_id(1)
    if FIXED:
        b = tl.program_id(0)
        tiles, each = cut(keys_of(lengths, b, B, tokens_each, capacity), SPLITS, LEAST, BLOCK_N)
        place_of, step, count = b * SPLITS, 1, tl.cdiv(tiles, each)
        is_mine = count > 1
    else:
        begin, end, share = line(lengths, B, tokens_each, capacity, parts, LEAST, BLOCK_B, BLOCK_N)
        numbers = tl.arange(0, BLOCK_B)
        first, last = begin // share, (end - 1) // share
        is_split = (numbers < B) & (last > first)
        order = tl.cumsum(is_split.to(tl.int32))
        chosen = is_split & (order == tl.program_id(0) + 1)
        is_mine = tl.program_id(0) < tl.sum(is_split.to(tl.int32))
        b = tl.sum(tl.where(chosen, numbers, 0))
        part = tl.sum(tl.where(chosen, first, 0))
        # The first segment lies in slot 2 * part + 1, those of the next parts in 2 * part + 2, 2 * part + 4 ...
        place_of, step, count = 2 * part, 2, tl.sum(tl.where(chosen, last - first + 1, 0))
    if not is_mine:
        if DEPENDENT:  # this kernel must not end before the first one
            tl.extra.cuda.gdc_wait()
        return

    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    row_tile, head = row // BLOCK_M, row % H
    offs_s, offs_d = tl.arange(0, CHUNKS), tl.arange(0, WIDTH)
    m_i = tl.full((1,), MINUS_INFINITY, tl.float32)
    l_i = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, WIDTH), tl.float32)
    for start in tl.range(0, count, CHUNKS):
        i = start + offs_s
        place = place_of + i * step
        if not FIXED:
            place += i == 0
        in_range = (i < count)[:, None]
        source = ((place.to(tl.int64) * row_tiles + row_tile) * BLOCK_M + row % BLOCK_M)[:, None]  # (CHUNKS, 1)
        m_s = tl.load(partial_stat + source * 2, mask=in_range, other=MINUS_INFINITY)
        l_s = tl.load(partial_stat + source * 2 + 1, mask=in_range, other=0.0)
        acc_s = tl.load(
            partial_acc + source[:, :, None] * D_V + offs_d[None, None, :],
            mask=in_range[:, :, None] & (offs_d < D_V)[None, None, :],
            other=0.0,
        )  # (CHUNKS, 1, WIDTH)
        m_i, l_i, acc = joined(m_i, l_i, acc, m_s, l_s, acc_s)

    offs_r = tl.arange(0, 1)
    values, row_lse = finish(m_i, l_i, acc, sinks, head + offs_r, offs_r == 0)
    out_row = (b.to(tl.int64) * S_Q * H + row) + offs_r
    tl.store(o + out_row[:, None] * D_V + offs_d[None, :], values.to(o.dtype.element_ty), mask=(offs_d < D_V)[None, :])
    tl.store(lse + out_row, row_lse)
