"""The second kernel of attention over a KV cache: it joins the chunks of a row tile that has several.

A program has ROWS_EACH rows of one row tile and one key head, and reads SPLITS chunks of them at a time, always in the
order of the keys.
"""

import triton
import triton.language as tl

from tilewright.ops.attention.kernels.triton.paged.attend import finish
from tilewright.ops.attention.kernels.triton.paged.tasks import divide, sequence_bounds
from tilewright.ops.attention.kernels.triton.scores import MINUS_INFINITY


@triton.jit
def joined(m_i, l_i, acc, m_s, l_s, acc_s):
    """(m_i, l_i, acc) of rows, (ROWS,) and (ROWS, WIDTH), joined with those of several chunks, (CHUNKS, ROWS, ...)."""
    m_new = tl.maximum(m_i, tl.max(m_s, 0))
    base = tl.where(m_new == MINUS_INFINITY, 0.0, m_new)
    alpha, weight = tl.exp2(m_i - base), tl.exp2(m_s - base[None, :])
    l_new = l_i * alpha + tl.sum(l_s * weight, 0)
    return m_new, l_new, acc * alpha[:, None] + tl.sum(acc_s * weight[:, :, None], 0)


@triton.jit
def combine_kernel(
    partial_acc, partial_stat, o, lse, lengths, cu_seqlens, sinks,
    B, T, H_KV, capacity, left, enough, most,
    S_Q: tl.constexpr, GROUP: tl.constexpr, D_V: tl.constexpr, WIDTH: tl.constexpr, LEFT: tl.constexpr,
    DEPENDENT: tl.constexpr, FORM: tl.constexpr, FEW_ROWS: tl.constexpr, FIXED: tl.constexpr, LEAST: tl.constexpr,
    ROWS: tl.constexpr, ROWS_EACH: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Arguments as in `attend_kernel`; lengths and cu_seqlens are those that it read."""
    h_kv, slot = tl.program_id(0) % H_KV, tl.program_id(0) // H_KV
    rows_begin = tl.program_id(1) * ROWS_EACH
    row_tiles, chunks = divide(
        lengths, cu_seqlens, B, T, capacity, left, enough, most,
        S_Q, GROUP, FORM, FEW_ROWS, LEFT, FIXED, LEAST, BLOCK_B, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    split_tiles = tl.where(chunks > 1, row_tiles, 0)
    if slot >= tl.sum(split_tiles):
        if DEPENDENT:  # this kernel must not end before the first one
            tl.extra.cuda.gdc_wait()
        return
    before = tl.cumsum(split_tiles) <= slot
    b = tl.sum(before.to(tl.int32))
    row_tile = slot - tl.sum(tl.where(before, split_tiles, 0))
    count = tl.sum(tl.where(tl.arange(0, BLOCK_B) == b, chunks, 0))
    partial = tl.sum(tl.where(before, split_tiles * chunks, 0)) + row_tile * count
    first, end = sequence_bounds(cu_seqlens, b, B, T, S_Q)
    offs_r = rows_begin + tl.arange(0, ROWS_EACH)
    offs_m = row_tile * BLOCK_M + offs_r
    in_rows = (offs_m < (end - first) * GROUP) & (offs_r < BLOCK_M)
    token, head = offs_m // GROUP, h_kv * GROUP + offs_m % GROUP

    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    offs_s, offs_d = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    m_i = tl.full((ROWS_EACH,), MINUS_INFINITY, tl.float32)
    l_i = tl.zeros((ROWS_EACH,), tl.float32)
    acc = tl.zeros((ROWS_EACH, WIDTH), tl.float32)
    for start in tl.range(0, count, SPLITS):
        chunk = (start + offs_s)[:, None]
        mask = (chunk < count) & in_rows[None, :]  # (SPLITS, ROWS_EACH)
        row = ((partial + chunk).to(tl.int64) * H_KV + h_kv) * ROWS + offs_r[None, :]
        m_s = tl.load(partial_stat + row * 2, mask=mask, other=MINUS_INFINITY)
        l_s = tl.load(partial_stat + row * 2 + 1, mask=mask, other=0.0)
        acc_s = tl.load(
            partial_acc + row[:, :, None] * D_V + offs_d[None, None, :],
            mask=mask[:, :, None] & (offs_d < D_V)[None, None, :],
            other=0.0,
        )  # (SPLITS, ROWS_EACH, WIDTH)
        m_i, l_i, acc = joined(m_i, l_i, acc, m_s, l_s, acc_s)

    values, row_lse = finish(m_i, l_i, acc, sinks, head, in_rows)
    out_row = (first + token).to(tl.int64) * (H_KV * GROUP) + head
    out_mask = in_rows[:, None] & (offs_d < D_V)[None, :]
    tl.store(o + out_row[:, None] * D_V + offs_d[None, :], values.to(o.dtype.element_ty), mask=out_mask)
    tl.store(lse + out_row, row_lse, mask=in_rows)
