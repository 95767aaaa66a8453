"""The backward kernels: gradients of keys and values by tiles of keys, gradients of queries by tiles of queries.

Both compute the probabilities again from q, k and lse.  No sums are shared between programs, so that the results are
the same bits in every run.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from tilewright.ops.attention.engines.triton_scores import (
    LOG2E,
    describe,
    keys_of_tile,
    place,
    queries_of_tile,
    rows,
    store_rows,
    transformed,
    visible,
)


@triton.jit
def _gradient(
    s, dp, log, delta, positions, keys, scale, softcap, slope, is_partial, S_k, left, right, data, b, h,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PROGRAM: tl.constexpr, MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr, SLOPES: tl.constexpr,
):  # fmt: skip  # -> p, ds; both fp32
    """s: q k^T, dp: do v^T, either way round; log: lse in base 2, +inf where there is no query; ds without `scale`."""
    if SOFTCAP or SLOPES:
        s, capped = transformed(s, positions, keys, scale, softcap, slope, SOFTCAP, SLOPES)
        p = tl.exp2(s - log)
    else:
        p = tl.exp2(s * (scale * LOG2E) - log)
    if MASKED:  # noqa: SIM102  known when the kernel is compiled, the other is not
        if is_partial:
            p = tl.where(visible(positions, keys, S_k, left, right, data, b, h, LEFT, RIGHT, PROGRAM), p, 0.0)
    ds = p * (dp - delta)
    if SOFTCAP:
        share = capped / (softcap * LOG2E)
        ds = ds * (1.0 - share * share)
    return p, ds


@triton.jit
def keys_kernel(
    dk, dv, do, delta, q, k, v, lse, slopes, data, counts, indices,  # dk, k: (B, H // group, S_k, D)   dv, v: D_V
    B, H, group, S_q, S_k, left, right, scale, softcap, chunk,  # q: (B, H, S_q, D)   do: D_V   delta, lse: fp32
    stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs,
    stride_dob, stride_doh, stride_dos, stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_table_b, stride_table_h, pitch,
    dk_pe, q_pe, k_pe, stride_qpb, stride_qph, stride_qps, stride_kpb, stride_kph, stride_kps,  # None where P is 0
    D: tl.constexpr, D_V: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    D_PE: tl.constexpr, P: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PROGRAM: tl.constexpr, SOFTCAP: tl.constexpr,
    DESCRIPTORS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk, dv of BLOCK_N keys of one kv head: a loop over its query heads and their tiles of BLOCK_M queries.

    P > 0: as in the forward; dk_pe (B, H // group, S_k, D_PE) fp32, contiguous, is one kv head's share of k_pe's.
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    MASKED: tl.constexpr = LEFT or RIGHT or PROGRAM != ""
    heads_kv = H // group
    tile_n, head_kv = place(tl.program_id(0), tl.cdiv(S_k, BLOCK_N), B * heads_kv, chunk, LEFT and not RIGHT)
    b, h_kv = head_kv // heads_kv, head_kv % heads_kv
    q0, q1, do0, do1, qp = q, q, do, do, q_pe
    if DESCRIPTORS:
        q0 = describe(q, B, H, S_q, stride_qb, stride_qh, stride_qs, D, D0, BLOCK_M)
        do0 = describe(do, B, H, S_q, stride_dob, stride_doh, stride_dos, D_V, V0, BLOCK_M)
        if D1 > 0:
            q1 = describe(q, B, H, S_q, stride_qb, stride_qh, stride_qs, D, D1, BLOCK_M)
        if V1 > 0:
            do1 = describe(do, B, H, S_q, stride_dob, stride_doh, stride_dos, D_V, V1, BLOCK_M)
        if P > 0:
            qp = describe(q_pe, B, H, S_q, stride_qpb, stride_qph, stride_qps, D_PE, P, BLOCK_M)
    start_n = tile_n * BLOCK_N
    k += b.to(tl.int64) * stride_kb + h_kv.to(tl.int64) * stride_kh
    v += b.to(tl.int64) * stride_vb + h_kv.to(tl.int64) * stride_vh
    k0 = rows(k, None, b, h_kv, start_n, S_k, stride_ks, 0, D0, D, BLOCK_N, False)
    v0 = rows(v, None, b, h_kv, start_n, S_k, stride_vs, 0, V0, D_V, BLOCK_N, False)
    dk0 = tl.zeros((BLOCK_N, D0), tl.float32)
    dv0 = tl.zeros((BLOCK_N, V0), tl.float32)
    if D1 > 0:
        k1 = rows(k, None, b, h_kv, start_n, S_k, stride_ks, D0, D1, D, BLOCK_N, False)
        dk1 = tl.zeros((BLOCK_N, D1), tl.float32)
    if V1 > 0:
        v1 = rows(v, None, b, h_kv, start_n, S_k, stride_vs, V0, V1, D_V, BLOCK_N, False)
        dv1 = tl.zeros((BLOCK_N, V1), tl.float32)
    if P > 0:
        k_pe += b.to(tl.int64) * stride_kpb
        kp = rows(k_pe, None, b, 0, start_n, S_k, stride_kps, 0, P, D_PE, BLOCK_N, False)
        dkp = tl.zeros((BLOCK_N, P), tl.float32)
    keys = start_n + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)

    for g in tl.range(0, group):
        h = h_kv * group + g
        at_q = q + (b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh)
        at_do = do + (b.to(tl.int64) * stride_dob + h.to(tl.int64) * stride_doh)
        at_qp = q_pe
        if P > 0:
            at_qp = q_pe + (b.to(tl.int64) * stride_qpb + h.to(tl.int64) * stride_qph)
        line_of_row = (b * H + h).to(tl.int64) * S_q
        slope = 0.0 if slopes is None else tl.load(slopes + h)
        if PROGRAM != "":
            line = b * stride_table_b + h * stride_table_h + tile_n
            partial = tl.load(counts + line * 2)
            count = partial + tl.load(counts + line * 2 + 1)
            tiles = indices + line.to(tl.int64) * pitch
        else:
            first, end, whole_from, whole_to = queries_of_tile(
                start_n, tl.minimum(start_n + BLOCK_N, S_k) - 1, S_q, S_k, left, right, BLOCK_M, LEFT, RIGHT
            )
            count = tl.maximum(end - first, 0)
        for e in tl.range(0, count):
            if PROGRAM != "":
                start = tl.load(tiles + e).to(tl.int32) * BLOCK_M
                is_partial = e < partial
            else:
                start = (first + e) * BLOCK_M
                is_partial = (start < whole_from * BLOCK_M) | (start >= whole_to * BLOCK_M)
            q0_tile = rows(at_q, q0, b, h, start, S_q, stride_qs, 0, D0, D, BLOCK_M, DESCRIPTORS)
            s = tl.dot(k0, q0_tile.T, input_precision="ieee")
            if D1 > 0:
                q1_tile = rows(at_q, q1, b, h, start, S_q, stride_qs, D0, D1, D, BLOCK_M, DESCRIPTORS)
                s = tl.dot(k1, q1_tile.T, s, input_precision="ieee")
            if P > 0:
                qp_tile = rows(at_qp, qp, b, h, start, S_q, stride_qps, 0, P, D_PE, BLOCK_M, DESCRIPTORS)
                s = tl.dot(kp, qp_tile.T, s, input_precision="ieee")
            do0_tile = rows(at_do, do0, b, h, start, S_q, stride_dos, 0, V0, D_V, BLOCK_M, DESCRIPTORS)
            dp = tl.dot(v0, do0_tile.T, input_precision="ieee")
            if V1 > 0:
                do1_tile = rows(at_do, do1, b, h, start, S_q, stride_dos, V0, V1, D_V, BLOCK_M, DESCRIPTORS)
                dp = tl.dot(v1, do1_tile.T, dp, input_precision="ieee")
            i = start + offs_m
            log = tl.load(lse + line_of_row + i, mask=i < S_q, other=float("inf")) * LOG2E
            shift = tl.load(delta + line_of_row + i, mask=i < S_q, other=0.0)
            p, ds = _gradient(
                s, dp, log[None, :], shift[None, :], (i + S_k - S_q)[None, :], keys[:, None], scale, softcap, slope,
                is_partial, S_k, left, right, data, b, h, LEFT, RIGHT, PROGRAM, MASKED, SOFTCAP, slopes is not None,
            )  # fmt: skip
            p = p.to(DTYPE)
            dv0 = tl.dot(p, do0_tile, dv0, input_precision="ieee")
            if V1 > 0:
                dv1 = tl.dot(p, do1_tile, dv1, input_precision="ieee")
            ds = ds.to(DTYPE)
            dk0 = tl.dot(ds, q0_tile, dk0, input_precision="ieee")
            if D1 > 0:
                dk1 = tl.dot(ds, q1_tile, dk1, input_precision="ieee")
            if P > 0:
                dkp = tl.dot(ds, qp_tile, dkp, input_precision="ieee")

    dk += b.to(tl.int64) * stride_dkb + h_kv.to(tl.int64) * stride_dkh
    dv += b.to(tl.int64) * stride_dvb + h_kv.to(tl.int64) * stride_dvh
    store_rows(dk, dk0 * scale, start_n, S_k, stride_dks, 0, D)
    store_rows(dv, dv0, start_n, S_k, stride_dvs, 0, D_V)
    if D1 > 0:
        store_rows(dk, dk1 * scale, start_n, S_k, stride_dks, D0, D)
    if V1 > 0:
        store_rows(dv, dv1, start_n, S_k, stride_dvs, V0, D_V)
    if P > 0:
        dk_pe += (b * heads_kv + h_kv).to(tl.int64) * S_k * D_PE
        store_rows(dk_pe, dkp * scale, start_n, S_k, D_PE, 0, D_PE)


@triton.jit
def queries_kernel(
    dq, means, do, delta, q, k, v, lse, slopes, data, counts, indices,  # dq, q: (B, H, S_q, D)   do: (B, H, S_q, D_V)
    B, H, group, S_q, S_k, left, right, scale, softcap, chunk,  # k, v: (B, H // group, S_k, .)   delta, lse: fp32
    stride_dqb, stride_dqh, stride_dqs, stride_dob, stride_doh, stride_dos, stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_table_b, stride_table_h, pitch,
    dq_pe, q_pe, k_pe, stride_dqpb, stride_dqph, stride_dqps, stride_qpb, stride_qph, stride_qps,  # None where P is 0
    stride_kpb, stride_kph, stride_kps,
    D: tl.constexpr, D_V: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    D_PE: tl.constexpr, P: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PROGRAM: tl.constexpr, SOFTCAP: tl.constexpr, RAGGED: tl.constexpr,
    DESCRIPTORS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries of one head: a loop over the tiles of BLOCK_N keys that they may see.

    P > 0: as in the forward; dq_pe (B, H, S_q, D_PE).
    means: None, or (B, H, S_q) fp32 gets sum of p * (do v^T) over keys: what delta is, less dlse, without o's rounding.
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    MASKED: tl.constexpr = LEFT or RIGHT or RAGGED or PROGRAM != ""
    tile_m, head = place(tl.program_id(0), tl.cdiv(S_q, BLOCK_M), B * H, chunk, RIGHT and not LEFT)
    b, h = head // H, head % H
    h_kv = h // group
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
    q += b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    do += b.to(tl.int64) * stride_dob + h.to(tl.int64) * stride_doh
    k += b.to(tl.int64) * stride_kb + h_kv.to(tl.int64) * stride_kh
    v += b.to(tl.int64) * stride_vb + h_kv.to(tl.int64) * stride_vh
    start_m = tile_m * BLOCK_M
    p0 = start_m + S_k - S_q
    if PROGRAM != "":
        line = b * stride_table_b + h * stride_table_h + tile_m
        partial = tl.load(counts + line * 2)
        count = partial + tl.load(counts + line * 2 + 1)
        indices += line.to(tl.int64) * pitch
    else:
        p1 = tl.minimum(start_m + BLOCK_M, S_q) - 1 + S_k - S_q
        first, end, whole_from, whole_to = keys_of_tile(p0, p1, S_k, left, right, BLOCK_N, LEFT, RIGHT)
        count = tl.maximum(end - first, 0)
    q0 = rows(q, None, b, h, start_m, S_q, stride_qs, 0, D0, D, BLOCK_M, False)
    do0 = rows(do, None, b, h, start_m, S_q, stride_dos, 0, V0, D_V, BLOCK_M, False)
    dq0 = tl.zeros((BLOCK_M, D0), tl.float32)
    if D1 > 0:
        q1 = rows(q, None, b, h, start_m, S_q, stride_qs, D0, D1, D, BLOCK_M, False)
        dq1 = tl.zeros((BLOCK_M, D1), tl.float32)
    if V1 > 0:
        do1 = rows(do, None, b, h, start_m, S_q, stride_dos, V0, V1, D_V, BLOCK_M, False)
    if P > 0:
        q_pe += b.to(tl.int64) * stride_qpb + h.to(tl.int64) * stride_qph
        k_pe += b.to(tl.int64) * stride_kpb
        qp = rows(q_pe, None, b, h, start_m, S_q, stride_qps, 0, P, D_PE, BLOCK_M, False)
        dqp = tl.zeros((BLOCK_M, P), tl.float32)
    i = start_m + tl.arange(0, BLOCK_M)
    row = head.to(tl.int64) * S_q + i
    log = tl.load(lse + row, mask=i < S_q, other=float("inf")) * LOG2E
    shift = tl.load(delta + row, mask=i < S_q, other=0.0)
    positions = p0 + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    slope = 0.0 if slopes is None else tl.load(slopes + h)
    if means is not None:
        mean = tl.zeros((BLOCK_M,), tl.float32)

    for e in tl.range(0, count):
        if PROGRAM != "":
            start = tl.load(indices + e).to(tl.int32) * BLOCK_N
            is_partial = e < partial
        else:
            start = (end - 1 - e) * BLOCK_N
            is_partial = (start < whole_from * BLOCK_N) | (start >= whole_to * BLOCK_N)
        k0_tile = rows(k, k0, b, h_kv, start, S_k, stride_ks, 0, D0, D, BLOCK_N, DESCRIPTORS)
        s = tl.dot(q0, k0_tile.T, input_precision="ieee")
        if D1 > 0:
            k1_tile = rows(k, k1, b, h_kv, start, S_k, stride_ks, D0, D1, D, BLOCK_N, DESCRIPTORS)
            s = tl.dot(q1, k1_tile.T, s, input_precision="ieee")
        if P > 0:
            kp_tile = rows(k_pe, kp, b, 0, start, S_k, stride_kps, 0, P, D_PE, BLOCK_N, DESCRIPTORS)
            s = tl.dot(qp, kp_tile.T, s, input_precision="ieee")
        v_tile = rows(v, v0, b, h_kv, start, S_k, stride_vs, 0, V0, D_V, BLOCK_N, DESCRIPTORS)
        dp = tl.dot(do0, v_tile.T, input_precision="ieee")
        if V1 > 0:
            v_tile = rows(v, v1, b, h_kv, start, S_k, stride_vs, V0, V1, D_V, BLOCK_N, DESCRIPTORS)
            dp = tl.dot(do1, v_tile.T, dp, input_precision="ieee")
        p, ds = _gradient(
            s, dp, log[:, None], shift[:, None], positions[:, None], (start + offs_n)[None, :], scale, softcap, slope,
            is_partial, S_k, left, right, data, b, h, LEFT, RIGHT, PROGRAM, MASKED, SOFTCAP, slopes is not None,
        )  # fmt: skip
        if means is not None:
            mean += tl.sum(p * dp, 1)
        ds = ds.to(DTYPE)
        dq0 = tl.dot(ds, k0_tile, dq0, input_precision="ieee")
        if D1 > 0:
            dq1 = tl.dot(ds, k1_tile, dq1, input_precision="ieee")
        if P > 0:
            dqp = tl.dot(ds, kp_tile, dqp, input_precision="ieee")

    dq += b.to(tl.int64) * stride_dqb + h.to(tl.int64) * stride_dqh
    # Where a row sees nothing, its tile may hold 0 * NaN
    if means is not None:
        tl.store(means + row, tl.where(log == float("-inf"), 0.0, mean), mask=i < S_q)
    nothing = (log == float("-inf"))[:, None]
    store_rows(dq, tl.where(nothing, 0.0, dq0 * scale), start_m, S_q, stride_dqs, 0, D)
    if D1 > 0:
        store_rows(dq, tl.where(nothing, 0.0, dq1 * scale), start_m, S_q, stride_dqs, D0, D)
    if P > 0:
        dq_pe += b.to(tl.int64) * stride_dqpb + h.to(tl.int64) * stride_dqph
        store_rows(dq_pe, tl.where(nothing, 0.0, dqp * scale), start_m, S_q, stride_dqps, 0, D_PE)
