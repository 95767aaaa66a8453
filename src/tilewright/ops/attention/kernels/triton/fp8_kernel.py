"""The float8 forward kernel: one program per query tile of one head, an online softmax over the key tiles it sees.

P is 2^8 * exp(s - max), rounded to e4m3: its largest value is 256, exactly.  P V of each tile starts at zero and is
added to the fp32 accumulator, because Hopper's tensor cores keep 14 bits of a float8 sum; so one scale per block of V
costs one multiplication more, and one scale per head none.
"""

import triton
import triton.language as tl

from tilewright.ops.attention.fmha_fp8.rounding import SCALE_BLOCK as TOKENS
from tilewright.ops.attention.fmha_fp8.rounding import SHIFT as EXPONENT
from tilewright.ops.attention.kernels.triton.scores import (
    LN2,
    LOG2E,
    MINUS_INFINITY,
    apply_softcap_alibi,
    describe,
    keys_of_tile,
    load_rows,
    schedule_tile,
    store_rows,
    visible,
)
from tilewright.ops.quant.kernels.triton.numbers import decode

SCALE_BLOCK = tl.constexpr(TOKENS)
SHIFT = tl.constexpr(float(EXPONENT))


@triton.jit
def _operand(x):  # e4m3, or its bytes where the GPU has no such type -> the operand of tl.dot
    if x.dtype == tl.uint8:
        x = decode(x).to(tl.float16)  # float16 holds every e4m3 number
    return x


@triton.jit
def forward_kernel(
    o, lse, q, k, v, q_scale, k_scale, v_scale, sinks, mask_data, counts, indices,  # o: (B, H, S_q, D_V)
    B, H, group, S_q, S_k, left, right, scale, softcap, chunk,  # q: (B, H, S_q, D)   k, v: (B, H // group, S_k, .)
    stride_ob, stride_oh, stride_os, stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_qsb, stride_qsh, stride_qsn, stride_ksb, stride_ksh, stride_ksn, stride_vsb, stride_vsh, stride_vsn,
    stride_table_b, stride_table_h, stride_table_m,
    D: tl.constexpr, D_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    K_BLOCKS: tl.constexpr, V_BLOCKS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PROGRAM: tl.constexpr, SOFTCAP: tl.constexpr, GENERAL: tl.constexpr,
    RAGGED: tl.constexpr, DESCRIPTORS: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """o = v_scale * softmax(s) v, lse = log(sum of exp(s)), s = scale * q_scale * k_scale * q k^T.

    K_BLOCKS, V_BLOCKS: K and V have one scale per block of keys, not one per head.
    TRANSPOSED: v is transposed, (B, H // group, D_V, S_k).
    """
    MASKED: tl.constexpr = LEFT or RIGHT or RAGGED or PROGRAM != ""
    tiles = tl.cdiv(S_q, BLOCK_M)
    tile_m, head = schedule_tile(tl.program_id(0), tiles, B * H, chunk, RIGHT and not LEFT)
    b, h = head // H, head % H
    h_kv = h // group
    q += b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    o += b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh
    k_tiles, v_tiles = k, v
    if DESCRIPTORS:
        heads_kv = H // group
        k_tiles = describe(k, B, heads_kv, S_k, stride_kb, stride_kh, stride_ks, D, WIDTH, BLOCK_N)
        if TRANSPOSED:
            v_tiles = tl.make_tensor_descriptor(
                v, [B, heads_kv, D_V, S_k], [stride_vb, stride_vh, stride_vs, 1], [1, 1, WIDTH_V, BLOCK_N]
            )
        else:
            v_tiles = describe(v, B, heads_kv, S_k, stride_vb, stride_vh, stride_vs, D_V, WIDTH_V, BLOCK_N)
    k += b.to(tl.int64) * stride_kb + h_kv.to(tl.int64) * stride_kh
    v += b.to(tl.int64) * stride_vb + h_kv.to(tl.int64) * stride_vh
    k_scale += b * stride_ksb + h_kv * stride_ksh
    v_scale += b * stride_vsb + h_kv * stride_vsh

    # The key tiles to visit: a band from the last to the first, a program as its tile table lists them
    start_m = tile_m * BLOCK_M
    pos_first = start_m + S_k - S_q
    pos_last = tl.minimum(start_m + BLOCK_M, S_q) - 1 + S_k - S_q
    if PROGRAM != "":
        table_row = b * stride_table_b + h * stride_table_h + tile_m
        partial = tl.load(counts + table_row * 2)
        count = partial + tl.load(counts + table_row * 2 + 1)
        indices += table_row.to(tl.int64) * stride_table_m
    else:
        first, end, full_first, full_end = keys_of_tile(pos_first, pos_last, S_k, left, right, BLOCK_N, LEFT, RIGHT)
        count = tl.maximum(end - first, 0)

    # Load Q; a query tile lies inside the block of one scale
    positions = pos_first + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    scale *= tl.load(q_scale + b * stride_qsb + h * stride_qsh + start_m // SCALE_BLOCK * stride_qsn)
    if not K_BLOCKS:
        scale *= tl.load(k_scale)
    qk_scale = 1.0 if GENERAL else scale * LOG2E
    q_tile = _operand(load_rows(q, None, b, h, start_m, S_q, stride_qs, 0, WIDTH, D, BLOCK_M, False))
    m_i = tl.full((BLOCK_M,), MINUS_INFINITY, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, WIDTH_V), tl.float32)

    for n in tl.range(0, count):
        if PROGRAM != "":
            start = tl.load(indices + n).to(tl.int32) * BLOCK_N
        else:
            start = (end - 1 - n) * BLOCK_N
        # S = Q K^T
        k_tile = load_rows(k, k_tiles, b, h_kv, start, S_k, stride_ks, 0, WIDTH, D, BLOCK_N, DESCRIPTORS)
        s = tl.dot(q_tile, _operand(k_tile).T)
        keys = start + offs_n
        if GENERAL:
            tile_scale = scale
            if K_BLOCKS:
                tile_scale = scale * tl.load(k_scale + start // SCALE_BLOCK * stride_ksn)
            s, _ = apply_softcap_alibi(s, positions[:, None], keys[None, :], tile_scale, softcap, 0.0, SOFTCAP, False)

        # Mask, in tiles that are partly visible
        if MASKED:
            if PROGRAM != "":
                is_partial = n < partial
            else:
                is_partial = (start < full_first * BLOCK_N) | (start >= full_end * BLOCK_N)
            if is_partial:
                mask = visible(
                    positions[:, None], keys[None, :], S_k, left, right, mask_data, b, h, LEFT, RIGHT, PROGRAM
                )
                s = tl.where(mask, s, MINUS_INFINITY)

        # Online softmax
        m_new = tl.maximum(m_i, tl.max(s, 1))
        m_scaled = m_new * qk_scale
        if MASKED:
            m_scaled = tl.where(m_new == MINUS_INFINITY, 0.0, m_scaled)
        p = tl.exp2(s * qk_scale - (m_scaled - SHIFT)[:, None])
        alpha = tl.exp2(m_i * qk_scale - m_scaled)
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new

        # O += P V
        if TRANSPOSED:
            v_tile = v_tiles.load([b, h_kv, 0, start]).reshape(WIDTH_V, BLOCK_N).T
        else:
            v_tile = load_rows(v, v_tiles, b, h_kv, start, S_k, stride_vs, 0, WIDTH_V, D_V, BLOCK_N, DESCRIPTORS)
        v_tile = _operand(v_tile)
        product = tl.dot(p.to(v_tile.dtype), v_tile)
        if V_BLOCKS:
            product *= tl.load(v_scale + start // SCALE_BLOCK * stride_vsn)
        acc = acc * alpha[:, None] + product

    # Add the sink, normalise, write lse and o.  A row without keys has l_i = 0, and its acc may be 0 * NaN
    m_log2 = m_i * qk_scale - SHIFT  # l_i is 2^8 times the sum
    empty = l_i == 0.0
    norm = tl.full((BLOCK_M,), 1.0, tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + h) * LOG2E
        m_sink = tl.maximum(m_log2, sink)
        base = tl.where(m_sink == MINUS_INFINITY, 0.0, m_sink)
        norm = tl.exp2(m_log2 - base)
        l_i = l_i * norm + tl.exp2(sink - base)
        m_log2 = m_sink
    norm = tl.where(l_i == 0.0, 0.0, norm / l_i)
    row_lse = tl.where(l_i == 0.0, MINUS_INFINITY, (m_log2 + tl.log2(l_i)) * LN2)
    if not V_BLOCKS:
        norm *= tl.load(v_scale)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    tl.store(lse + head.to(tl.int64) * S_q + offs_m, row_lse, mask=offs_m < S_q)
    acc = tl.where(empty[:, None], 0.0, acc * norm[:, None])
    store_rows(o, acc, start_m, S_q, stride_os, 0, D_V)
