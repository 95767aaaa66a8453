"""The kernel of attention over a KV cache: a program computes one task, a chunk of the keys of one row tile.

The rows of a tile are tokens times the query heads of one key head, so that each key is read once for the group.  An
online softmax runs over key tiles.  If the row tile has one chunk, o and lse are written; else the unnormalised sum,
the maximum and the denominator, for the second kernel.
"""

import triton
import triton.language as tl

from tilewright.ops.attention.kernels.triton.paged.tasks import divide, sequence_bounds, sequence_length
from tilewright.ops.attention.kernels.triton.scores import LN2, LOG2E, MINUS_INFINITY
from tilewright.ops.quant.kernels.triton.numbers import decode


@triton.jit
def _as_operand(x, DTYPE: tl.constexpr):
    """Widen e4m3, or its bytes, to DTYPE, which holds each of its numbers."""
    if x.dtype == tl.uint8:
        x = decode(x).to(DTYPE)
    elif x.dtype == tl.float8e4nv:
        x = x.to(DTYPE)
    return x


@triton.jit
def normaliser(m_i, l_i, sinks, heads, in_range):
    """(factor of the sum, lse) of rows: the sink joins the denominator.  m_i in units of log2; a row without keys has
    l_i = 0.
    """
    norm = tl.full(m_i.shape, 1.0, tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=in_range, other=0.0) * LOG2E
        m_sink = tl.maximum(m_i, sink)
        base = tl.where(m_sink == MINUS_INFINITY, 0.0, m_sink)
        norm = tl.exp2(m_i - base)
        l_i = l_i * norm + tl.exp2(sink - base)
        m_i = base
    empty = l_i == 0.0
    row_lse = tl.where(empty, MINUS_INFINITY, (m_i + tl.log2(l_i)) * LN2)
    return norm * (1.0 / tl.where(empty, 1.0, l_i)), row_lse


@triton.jit
def finish(m_i, l_i, acc, sinks, heads, in_range):
    """(o, lse) of rows."""
    factor, row_lse = normaliser(m_i, l_i, sinks, heads, in_range)
    return acc * factor[:, None], row_lse


@triton.jit
def attend_kernel(
    q, o, lse, partial_acc, partial_stat, k, v, lengths, block_table, cu_seqlens, sinks, q_scale, k_scale, v_scale,
    B, T, H_KV, capacity, page_size, left, enough, most, scale, softcap,
    stride_qt, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh, stride_table,
    stride_qsb, stride_qsh, stride_ksp, stride_kss, stride_ksh, stride_vsp, stride_vss, stride_vsh,
    S_Q: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, LEFT: tl.constexpr, SOFTCAP: tl.constexpr, TOKEN_SCALES: tl.constexpr,
    PAGE: tl.constexpr, PAGE_TILES: tl.constexpr, DEPENDENT: tl.constexpr,
    FORM: tl.constexpr, FEW_ROWS: tl.constexpr, FIXED: tl.constexpr, LEAST: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """o = softmax(scale * q k^T) v and lse over the visible keys of each sequence.

    q: (T, H, D)   k: (pages, page_size, H_KV, D)   v: (pages, page_size, H_KV, D_V)   o: (T, H, D_V)   lse: (T, H)
    partial_acc: (tasks, H_KV, ROWS, D_V), partial_stat: (tasks, H_KV, ROWS, 2) float32.
    PAGE: page_size if it is a power of two, else 0.   PAGE_TILES: a tile of keys lies in one page.
    TOKEN_SCALES: k_scale and v_scale are one for each token and head, else of heads; beside q_scale (B, H), of e4m3
    queries, those of each sequence.
    """
    WIDE: tl.constexpr = q.dtype.element_ty if q_scale is None else tl.float16
    if DEPENDENT:  # let the second kernel begin when SMs are free; it waits for the end of this one
        tl.extra.cuda.gdc_launch_dependents()
    h_kv, task = tl.program_id(0) % H_KV, tl.program_id(0) // H_KV
    row_tiles, chunks = divide(
        lengths, cu_seqlens, B, T, capacity, left, enough, most,
        S_Q, GROUP, FORM, FEW_ROWS, LEFT, FIXED, LEAST, BLOCK_B, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    tasks = row_tiles * chunks
    before = tl.cumsum(tasks) <= task
    if task >= tl.sum(tasks):
        return

    # This program's sequence b, row tile and chunk of keys
    b = tl.sum(before.to(tl.int32))
    local = task - tl.sum(tl.where(before, tasks, 0))
    partial = tl.sum(tl.where(before & (chunks > 1), tasks, 0)) + local
    count = tl.sum(tl.where(tl.arange(0, BLOCK_B) == b, chunks, 0))
    row_tile, chunk = local // count, local % count
    first, end = sequence_bounds(cu_seqlens, b, B, T, S_Q)
    length = sequence_length(lengths, b, B, capacity)
    tokens = end - first
    offs_m = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = offs_m < tokens * GROUP
    token, head = offs_m // GROUP, h_kv * GROUP + offs_m % GROUP
    position = length - tokens + token

    # Keys that some row of the tile sees, and of these the tiles of this chunk
    key_begin, key_end = 0, length
    if CAUSAL:
        last_token = tl.minimum(row_tile * BLOCK_M + BLOCK_M - 1, tokens * GROUP - 1) // GROUP
        key_end = tl.maximum(length - tokens + last_token + 1, 0)
    if LEFT:
        key_begin = tl.maximum(length - tokens + row_tile * BLOCK_M // GROUP - left, 0)
    first_tile = key_begin // BLOCK_N
    tiles = tl.maximum(tl.cdiv(key_end, BLOCK_N) - first_tile, 0)
    per_chunk = tl.cdiv(tiles, count)
    tile_begin = first_tile + chunk * per_chunk
    tile_end = tl.minimum(tile_begin + per_chunk, first_tile + tiles)

    # Load the queries
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, WIDTH)
    q_rows = q + (first + token).to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh + offs_d[None, :]
    q_tile = tl.load(q_rows, mask=in_rows[:, None] & (offs_d < D)[None, :], other=0.0)  # (BLOCK_M, WIDTH)
    k += h_kv.to(tl.int64) * stride_kh
    v += h_kv.to(tl.int64) * stride_vh
    q_tile = _as_operand(q_tile, WIDE)
    if q_scale is not None:
        row_scale = tl.load(q_scale + b * stride_qsb + head * stride_qsh, mask=in_rows, other=0.0)
        k_scale += b * stride_ksp
        v_scale += b * stride_vsp
    value_scale = 1.0
    if k_scale is not None:
        k_scale += h_kv * stride_ksh
        v_scale += h_kv * stride_vsh
        if not TOKEN_SCALES:
            scale *= tl.load(k_scale)
            value_scale = tl.load(v_scale)
    if block_table is not None:
        block_table += b.to(tl.int64) * stride_table

    # Running softmax in units of log2, in fp32
    m_i = tl.full((BLOCK_M,), MINUS_INFINITY, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for tile in tl.range(tile_begin, tile_end):
        keys = tile * BLOCK_N + offs_n
        in_range = (keys >= key_begin) & (keys < key_end)

        # Where the keys of this tile lie; nothing outside of the range is followed or read
        if block_table is None:
            page, slot = b.to(tl.int64), keys
        elif PAGE_TILES:
            start = tile * BLOCK_N
            if PAGE > 0:
                page, slot = tl.load(block_table + start // PAGE), start % PAGE + offs_n
            else:
                page, slot = tl.load(block_table + start // page_size), start % page_size + offs_n
        elif PAGE > 0:
            page, slot = tl.load(block_table + keys // PAGE, mask=in_range, other=0), keys % PAGE
        else:
            page, slot = tl.load(block_table + keys // page_size, mask=in_range, other=0), keys % page_size
        page, slot = page.to(tl.int64), slot.to(tl.int64)

        # S = Q K^T
        k_rows = k + (page * stride_kp + slot * stride_ks)[:, None] + offs_d[None, :]
        k_tile = tl.load(k_rows, mask=in_range[:, None] & (offs_d < D)[None, :], other=0.0)  # (BLOCK_N, WIDTH)
        k_tile = _as_operand(k_tile, WIDE)
        s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        if q_scale is not None:
            s *= row_scale[:, None]
        if TOKEN_SCALES:
            s *= tl.load(k_scale + page * stride_ksp + slot * stride_kss, mask=in_range, other=0.0)[None, :]
        if SOFTCAP:  # tanh(x) = 1 - 2 / (1 + e^2x)
            s = softcap * LOG2E * (1.0 - 2.0 / (1.0 + tl.exp2(s * (scale / softcap * (2.0 * LOG2E)))))
        else:
            s *= scale * LOG2E
        visible = in_range[None, :]
        if CAUSAL:
            visible = visible & (keys[None, :] <= position[:, None])
        if LEFT:
            visible = visible & (keys[None, :] >= (position - left)[:, None])
        s = tl.where(visible, s, MINUS_INFINITY)

        # Online softmax
        m_new = tl.maximum(m_i, tl.max(s, 1))
        base = tl.where(m_new == MINUS_INFINITY, 0.0, m_new)
        p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(m_i - base)
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new

        # O += P V
        v_rows = v + (page * stride_vp + slot * stride_vs)[:, None] + offs_d[None, :]
        v_tile = tl.load(v_rows, mask=in_range[:, None] & (offs_d < D_V)[None, :], other=0.0)  # (BLOCK_N, WIDTH)
        v_tile = _as_operand(v_tile, WIDE)
        if TOKEN_SCALES:
            p *= tl.load(v_scale + page * stride_vsp + slot * stride_vss, mask=in_range, other=0.0)[None, :]
        acc = acc * alpha[:, None] + tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")

    if k_scale is not None and not TOKEN_SCALES:
        acc *= value_scale
    out_mask = in_rows[:, None] & (offs_d < D_V)[None, :]
    if count == 1:
        values, row_lse = finish(m_i, l_i, acc, sinks, head, in_rows)
        out_row = (first + token).to(tl.int64) * (H_KV * GROUP) + head
        tl.store(o + out_row[:, None] * D_V + offs_d[None, :], values.to(o.dtype.element_ty), mask=out_mask)
        tl.store(lse + out_row, row_lse, mask=in_rows)
    else:
        row = (partial.to(tl.int64) * H_KV + h_kv) * ROWS + tl.arange(0, BLOCK_M)
        tl.store(partial_acc + row[:, None] * D_V + offs_d[None, :], acc, mask=out_mask)
        tl.store(partial_stat + row * 2, m_i, mask=in_rows)
        tl.store(partial_stat + row * 2 + 1, l_i, mask=in_rows)
