"""The forward kernel: one tile of queries of one head, an online softmax along the tiles of keys that it may see.

A tile of keys that every query sees skips all mask arithmetic.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from tilewright.ops.attention.engines.triton_scores import (
    LN2,
    LOG2E,
    MINUS_INFINITY,
    describe,
    keys_of_tile,
    place,
    rows,
    store_rows,
    transformed,
    visible,
)


@triton.jit
def forward_kernel(
    o, lse, q, k, v, sinks, slopes, data, counts, indices,  # o: (B, H, S_q, D_V)   lse: (B, H, S_q) fp32
    B, H, group, S_q, S_k, left, right, scale, softcap, chunk,  # q: (B, H, S_q, D)   k, v: (B, H // group, S_k, .)
    stride_ob, stride_oh, stride_os, stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_table_b, stride_table_h, pitch,
    q_pe, k_pe, stride_qpb, stride_qph, stride_qps, stride_kpb, stride_kph, stride_kps,  # None where P is 0
    D: tl.constexpr, D_V: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    D_PE: tl.constexpr, P: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PROGRAM: tl.constexpr, SOFTCAP: tl.constexpr, GENERAL: tl.constexpr,
    RAGGED: tl.constexpr, DESCRIPTORS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """o = softmax(s) v, lse = log of the sum of e^s.

    P > 0: q_pe (B, H, S_q, D_PE) and k_pe (B, 1, S_k, D_PE) add their product to the scores of all heads.
    """
    DTYPE: tl.constexpr = v.dtype.element_ty
    MASKED: tl.constexpr = LEFT or RIGHT or RAGGED or PROGRAM != ""
    tiles = tl.cdiv(S_q, BLOCK_M)
    tile_m, head = place(tl.program_id(0), tiles, B * H, chunk, RIGHT and not LEFT)
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

    # Which tiles of keys: from the last to the first of a band, or as a table lists them
    start_m = tile_m * BLOCK_M
    p0 = start_m + S_k - S_q
    p1 = tl.minimum(start_m + BLOCK_M, S_q) - 1 + S_k - S_q
    if PROGRAM != "":
        line = b * stride_table_b + h * stride_table_h + tile_m
        partial = tl.load(counts + line * 2)
        count = partial + tl.load(counts + line * 2 + 1)
        indices += line.to(tl.int64) * pitch
    else:
        first, end, whole_from, whole_to = keys_of_tile(p0, p1, S_k, left, right, BLOCK_N, LEFT, RIGHT)
        count = tl.maximum(end - first, 0)

    positions = p0 + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    slope = 0.0 if slopes is None else tl.load(slopes + h)
    factor = 1.0 if GENERAL else scale * LOG2E
    q0 = rows(q, None, b, h, start_m, S_q, stride_qs, 0, D0, D, BLOCK_M, False)
    if D1 > 0:
        q1 = rows(q, None, b, h, start_m, S_q, stride_qs, D0, D1, D, BLOCK_M, False)
    if P > 0:
        q_pe += b.to(tl.int64) * stride_qpb + h.to(tl.int64) * stride_qph
        k_pe += b.to(tl.int64) * stride_kpb
        qp = rows(q_pe, None, b, h, start_m, S_q, stride_qps, 0, P, D_PE, BLOCK_M, False)
    m = tl.full((BLOCK_M,), MINUS_INFINITY, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc0 = tl.zeros((BLOCK_M, V0), tl.float32)
    if V1 > 0:
        acc1 = tl.zeros((BLOCK_M, V1), tl.float32)

    for e in tl.range(0, count):
        if PROGRAM != "":
            start = tl.load(indices + e).to(tl.int32) * BLOCK_N
        else:
            start = (end - 1 - e) * BLOCK_N
        s = tl.dot(
            q0, rows(k, k0, b, h_kv, start, S_k, stride_ks, 0, D0, D, BLOCK_N, DESCRIPTORS).T, input_precision="ieee"
        )
        if D1 > 0:
            k_tile = rows(k, k1, b, h_kv, start, S_k, stride_ks, D0, D1, D, BLOCK_N, DESCRIPTORS)
            s = tl.dot(q1, k_tile.T, s, input_precision="ieee")
        if P > 0:
            k_tile = rows(k_pe, kp, b, 0, start, S_k, stride_kps, 0, P, D_PE, BLOCK_N, DESCRIPTORS)
            s = tl.dot(qp, k_tile.T, s, input_precision="ieee")
        keys = start + offs_n
        if GENERAL:
            s, _ = transformed(s, positions[:, None], keys[None, :], scale, softcap, slope, SOFTCAP, slopes is not None)
        if MASKED:
            if PROGRAM != "":
                is_partial = e < partial
            else:
                is_partial = (start < whole_from * BLOCK_N) | (start >= whole_to * BLOCK_N)
            if is_partial:
                seen = visible(positions[:, None], keys[None, :], S_k, left, right, data, b, h, LEFT, RIGHT, PROGRAM)
                s = tl.where(seen, s, MINUS_INFINITY)
        new = tl.maximum(m, tl.max(s, 1))
        base = new * factor
        if MASKED:
            base = tl.where(new == MINUS_INFINITY, 0.0, base)
        p = tl.exp2(s * factor - base[:, None])
        alpha = tl.exp2(m * factor - base)
        total = total * alpha + tl.sum(p, 1)
        m = new
        p = p.to(DTYPE)
        v_tile = rows(v, v0, b, h_kv, start, S_k, stride_vs, 0, V0, D_V, BLOCK_N, DESCRIPTORS)
        acc0 = tl.dot(p, v_tile, acc0 * alpha[:, None], input_precision="ieee")
        if V1 > 0:
            v_tile = rows(v, v1, b, h_kv, start, S_k, stride_vs, V0, V1, D_V, BLOCK_N, DESCRIPTORS)
            acc1 = tl.dot(p, v_tile, acc1 * alpha[:, None], input_precision="ieee")

    # A row without keys has total = 0; what its accumulator holds may be 0 * NaN
    m2 = m * factor
    nothing = total == 0.0
    share = tl.full((BLOCK_M,), 1.0, tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + h) * LOG2E
        top = tl.maximum(m2, sink)
        base = tl.where(top == MINUS_INFINITY, 0.0, top)
        share = tl.exp2(m2 - base)
        total = total * share + tl.exp2(sink - base)
        m2 = top
    share = tl.where(total == 0.0, 0.0, share / total)
    log = tl.where(total == 0.0, MINUS_INFINITY, (m2 + tl.log2(total)) * LN2)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    tl.store(lse + head.to(tl.int64) * S_q + offs_m, log, mask=offs_m < S_q)
    acc0 = tl.where(nothing[:, None], 0.0, acc0 * share[:, None])
    store_rows(o, acc0, start_m, S_q, stride_os, 0, D_V)
    if V1 > 0:
        acc1 = tl.where(nothing[:, None], 0.0, acc1 * share[:, None])
        store_rows(o, acc1, start_m, S_q, stride_os, V0, D_V)
