"""The forward kernel: one program per query tile of one head, an online softmax over the key tiles that it sees.

Full key tiles, of which every query sees every key, skip the mask.
"""

import triton
import triton.language as tl

from tilewright.ops.attention.kernels.triton.scores import (
    LN2,
    LOG2E,
    MINUS_INFINITY,
    apply_softcap_alibi,
    describe,
    head_stream,
    kept,
    keys_of_tile,
    load_rows,
    schedule_tile,
    store_rows,
    visible,
)


@triton.jit
def forward_kernel(
    o, lse, q, k, v, sinks, slopes, mask_data, counts, indices,  # o: (B, H, S_q, D_V)   lse: (B, H, S_q) fp32
    B, H, group, S_q, S_k, left, right, scale, softcap, chunk,  # q: (B, H, S_q, D)   k, v: (B, H // group, S_k, .)
    stride_ob, stride_oh, stride_os, stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_table_b, stride_table_h, stride_table_m,
    q_pe, k_pe, stride_qpb, stride_qph, stride_qps, stride_kpb, stride_kph, stride_kps,  # None where P is 0
    seed, offset, last_dropped, keep_scale,  # None without dropout; seed, offset: () int64, offset also None
    D: tl.constexpr, D_V: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    D_PE: tl.constexpr, P: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PROGRAM: tl.constexpr, SOFTCAP: tl.constexpr, GENERAL: tl.constexpr,
    RAGGED: tl.constexpr, DESCRIPTORS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """o = softmax(s) v, lse = log(sum of exp(s)), s = scale * q k^T, softcapped, minus the ALiBi slope, masked.

    P > 0: q_pe (B, H, S_q, D_PE) and k_pe (B, 1, S_k, D_PE) add q_pe k_pe^T to the scores of all heads.
    seed: o = keep_scale * (softmax(s) where `kept`) v; lse is that of all.
    """
    DTYPE: tl.constexpr = v.dtype.element_ty
    MASKED: tl.constexpr = LEFT or RIGHT or RAGGED or PROGRAM != ""
    tiles = tl.cdiv(S_q, BLOCK_M)
    tile_m, head = schedule_tile(tl.program_id(0), tiles, B * H, chunk, RIGHT and not LEFT)
    b, h = head // H, head % H
    h_kv = h // group
    q += b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    o += b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh
    k0, k1, v0, v1, kp = k, k, v, v, k_pe
    if DESCRIPTORS:
        heads_kv = H // group
        k0 = describe(k, B, heads_kv, S_k, stride_kb, stride_kh, stride_ks, D, D0, BLOCK_N)
        v0 = describe(v, B, heads_kv, S_k, stride_vb, stride_vh, stride_vs, D_V, V0, BLOCK_N)
        if D1 > 0:
            k1 = describe(k, B, heads_kv, S_k, stride_kb, stride_kh, stride_ks, D, D1, BLOCK_N)
        if V1 > 0:
            v1 = describe(v, B, heads_kv, S_k, stride_vb, stride_vh, stride_vs, D_V, V1, BLOCK_N)
        if P > 0:
            kp = describe(k_pe, B, 1, S_k, stride_kpb, stride_kph, stride_kps, D_PE, P, BLOCK_N)
    k += b.to(tl.int64) * stride_kb + h_kv.to(tl.int64) * stride_kh
    v += b.to(tl.int64) * stride_vb + h_kv.to(tl.int64) * stride_vh

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

    # Load Q
    positions = pos_first + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    slope = 0.0 if slopes is None else tl.load(slopes + h)
    qk_scale = 1.0 if GENERAL else scale * LOG2E
    q0 = load_rows(q, None, b, h, start_m, S_q, stride_qs, 0, D0, D, BLOCK_M, False)
    if D1 > 0:
        q1 = load_rows(q, None, b, h, start_m, S_q, stride_qs, D0, D1, D, BLOCK_M, False)
    if P > 0:
        q_pe += b.to(tl.int64) * stride_qpb + h.to(tl.int64) * stride_qph
        k_pe += b.to(tl.int64) * stride_kpb
        qp = load_rows(q_pe, None, b, h, start_m, S_q, stride_qps, 0, P, D_PE, BLOCK_M, False)
    m_i = tl.full((BLOCK_M,), MINUS_INFINITY, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    if seed is not None:
        stream, c2, c3 = head_stream(seed, offset, b, h)
    acc0 = tl.zeros((BLOCK_M, V0), tl.float32)
    if V1 > 0:
        acc1 = tl.zeros((BLOCK_M, V1), tl.float32)

    for n in tl.range(0, count):
        if PROGRAM != "":
            start = tl.load(indices + n).to(tl.int32) * BLOCK_N
        else:
            start = (end - 1 - n) * BLOCK_N
        # S = Q K^T
        s = tl.dot(
            q0,
            load_rows(k, k0, b, h_kv, start, S_k, stride_ks, 0, D0, D, BLOCK_N, DESCRIPTORS).T,
            input_precision="ieee",
        )
        if D1 > 0:
            k_tile = load_rows(k, k1, b, h_kv, start, S_k, stride_ks, D0, D1, D, BLOCK_N, DESCRIPTORS)
            s = tl.dot(q1, k_tile.T, s, input_precision="ieee")
        if P > 0:
            k_tile = load_rows(k_pe, kp, b, 0, start, S_k, stride_kps, 0, P, D_PE, BLOCK_N, DESCRIPTORS)
            s = tl.dot(qp, k_tile.T, s, input_precision="ieee")
        keys = start + offs_n
        if GENERAL:
            s, _ = apply_softcap_alibi(
                s, positions[:, None], keys[None, :], scale, softcap, slope, SOFTCAP, slopes is not None
            )

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
        p = tl.exp2(s * qk_scale - m_scaled[:, None])
        alpha = tl.exp2(m_i * qk_scale - m_scaled)
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
        if seed is not None:
            p = tl.where(kept(stream, c2, c3, last_dropped, start_m, start, BLOCK_M, BLOCK_N, False), p, 0.0)

        # O += P V
        p = p.to(DTYPE)
        v_tile = load_rows(v, v0, b, h_kv, start, S_k, stride_vs, 0, V0, D_V, BLOCK_N, DESCRIPTORS)
        acc0 = tl.dot(p, v_tile, acc0 * alpha[:, None], input_precision="ieee")
        if V1 > 0:
            v_tile = load_rows(v, v1, b, h_kv, start, S_k, stride_vs, V0, V1, D_V, BLOCK_N, DESCRIPTORS)
            acc1 = tl.dot(p, v_tile, acc1 * alpha[:, None], input_precision="ieee")

    # Add the sink, normalise, write lse and o.  A row without keys has l_i = 0, and its acc may be 0 * NaN
    m_log2 = m_i * qk_scale
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
    if seed is not None:
        norm = norm * keep_scale
    row_lse = tl.where(l_i == 0.0, MINUS_INFINITY, (m_log2 + tl.log2(l_i)) * LN2)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    tl.store(lse + head.to(tl.int64) * S_q + offs_m, row_lse, mask=offs_m < S_q)
    acc0 = tl.where(empty[:, None], 0.0, acc0 * norm[:, None])
    store_rows(o, acc0, start_m, S_q, stride_os, 0, D_V)
    if V1 > 0:
        acc1 = tl.where(empty[:, None], 0.0, acc1 * norm[:, None])
        store_rows(o, acc1, start_m, S_q, stride_os, V0, D_V)
