"""The backward kernels: one program per key tile for dk and dv, one program per query tile for dq.

    P  = exp(S - lse)           S = scale * Q K^T, softcapped, minus the ALiBi slope, masked
    dV = P^T dO
    dP = dO V^T
    dS = P * (dP - delta)       delta = rowsum(dO * O) - dlse; with a softcap, times its derivative
    dQ = scale * dS K
    dK = scale * dS^T Q

Under dropout M is 1 / (1 - p) where a probability stays, else 0: dV = (P * M)^T dO and dP = M * (dO V^T).

Both kernels recompute P from q, k and lse.  No program adds to another's result, so every run gives the same bits.
"""

import triton
import triton.language as tl

from tilewright.ops.attention.kernels.triton.scores import (
    LOG2E,
    apply_softcap_alibi,
    describe,
    head_stream,
    kept,
    keys_of_tile,
    load_rows,
    queries_of_tile,
    schedule_tile,
    store_rows,
    visible,
)


@triton.jit
def _compute_p_ds(
    s, dp, row_lse, delta, positions, keys, scale, softcap, slope, is_partial, S_k, left, right, mask_data, b, h,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PROGRAM: tl.constexpr, MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr, SLOPES: tl.constexpr,
):  # fmt: skip
    """P and dS (without `scale`), fp32, from s = q k^T and dp = do v^T, or from their transposes.

    row_lse: in units of log2, +inf for rows beyond S_q.
    """
    if SOFTCAP or SLOPES:
        s, capped = apply_softcap_alibi(s, positions, keys, scale, softcap, slope, SOFTCAP, SLOPES)
        p = tl.exp2(s - row_lse)
    else:
        p = tl.exp2(s * (scale * LOG2E) - row_lse)
    if MASKED:  # noqa: SIM102  MASKED is a constant, is_partial is not
        if is_partial:
            p = tl.where(visible(positions, keys, S_k, left, right, mask_data, b, h, LEFT, RIGHT, PROGRAM), p, 0.0)
    ds = p * (dp - delta)
    if SOFTCAP:
        tanh = capped / (softcap * LOG2E)
        ds = ds * (1.0 - tanh * tanh)
    return p, ds


@triton.jit
def keys_kernel(
    dk, dv, do, delta, q, k, v, lse, slopes, mask_data, counts, indices,  # dk, k: (B, H // group, S_k, D)   dv, v: D_V
    B, H, group, S_q, S_k, left, right, scale, softcap, chunk,  # q: (B, H, S_q, D)   do: D_V   delta, lse: fp32
    stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs,
    stride_dob, stride_doh, stride_dos, stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_table_b, stride_table_h, stride_table_m,
    dk_pe, q_pe, k_pe, stride_qpb, stride_qph, stride_qps, stride_kpb, stride_kph, stride_kps,  # None where P is 0
    seed, offset, last_dropped, keep_scale,  # as in the forward
    D: tl.constexpr, D_V: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    D_PE: tl.constexpr, P: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PROGRAM: tl.constexpr, SOFTCAP: tl.constexpr,
    DESCRIPTORS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dV = sum of P^T dO and dK = scale * sum of dS^T Q for one key tile, over its query heads and their query tiles.

    P > 0: as in the forward; dk_pe (B, H // group, S_k, D_PE) fp32, contiguous: the gradient of k_pe per kv head.
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    MASKED: tl.constexpr = LEFT or RIGHT or PROGRAM != ""
    heads_kv = H // group
    tile_n, head_kv = schedule_tile(tl.program_id(0), tl.cdiv(S_k, BLOCK_N), B * heads_kv, chunk, LEFT and not RIGHT)
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

    # Load K and V
    start_n = tile_n * BLOCK_N
    k += b.to(tl.int64) * stride_kb + h_kv.to(tl.int64) * stride_kh
    v += b.to(tl.int64) * stride_vb + h_kv.to(tl.int64) * stride_vh
    k0 = load_rows(k, None, b, h_kv, start_n, S_k, stride_ks, 0, D0, D, BLOCK_N, False)
    v0 = load_rows(v, None, b, h_kv, start_n, S_k, stride_vs, 0, V0, D_V, BLOCK_N, False)
    dk0 = tl.zeros((BLOCK_N, D0), tl.float32)
    dv0 = tl.zeros((BLOCK_N, V0), tl.float32)
    if D1 > 0:
        k1 = load_rows(k, None, b, h_kv, start_n, S_k, stride_ks, D0, D1, D, BLOCK_N, False)
        dk1 = tl.zeros((BLOCK_N, D1), tl.float32)
    if V1 > 0:
        v1 = load_rows(v, None, b, h_kv, start_n, S_k, stride_vs, V0, V1, D_V, BLOCK_N, False)
        dv1 = tl.zeros((BLOCK_N, V1), tl.float32)
    if P > 0:
        k_pe += b.to(tl.int64) * stride_kpb
        kp = load_rows(k_pe, None, b, 0, start_n, S_k, stride_kps, 0, P, D_PE, BLOCK_N, False)
        dkp = tl.zeros((BLOCK_N, P), tl.float32)
    keys = start_n + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)

    for g in tl.range(0, group):
        h = h_kv * group + g
        q_head = q + (b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh)
        do_head = do + (b.to(tl.int64) * stride_dob + h.to(tl.int64) * stride_doh)
        q_pe_head = q_pe
        if P > 0:
            q_pe_head = q_pe + (b.to(tl.int64) * stride_qpb + h.to(tl.int64) * stride_qph)
        stats_row = (b * H + h).to(tl.int64) * S_q
        slope = 0.0 if slopes is None else tl.load(slopes + h)
        if seed is not None:
            stream, c2, c3 = head_stream(seed, offset, b, h)

        # The query tiles to visit
        if PROGRAM != "":
            table_row = b * stride_table_b + h * stride_table_h + tile_n
            partial = tl.load(counts + table_row * 2)
            count = partial + tl.load(counts + table_row * 2 + 1)
            tiles = indices + table_row.to(tl.int64) * stride_table_m
        else:
            first, end, full_first, full_end = queries_of_tile(
                start_n, tl.minimum(start_n + BLOCK_N, S_k) - 1, S_q, S_k, left, right, BLOCK_M, LEFT, RIGHT
            )
            count = tl.maximum(end - first, 0)
        for n in tl.range(0, count):
            if PROGRAM != "":
                start = tl.load(tiles + n).to(tl.int32) * BLOCK_M
                is_partial = n < partial
            else:
                start = (first + n) * BLOCK_M
                is_partial = (start < full_first * BLOCK_M) | (start >= full_end * BLOCK_M)

            # S^T = K Q^T
            q0_tile = load_rows(q_head, q0, b, h, start, S_q, stride_qs, 0, D0, D, BLOCK_M, DESCRIPTORS)
            s = tl.dot(k0, q0_tile.T, input_precision="ieee")
            if D1 > 0:
                q1_tile = load_rows(q_head, q1, b, h, start, S_q, stride_qs, D0, D1, D, BLOCK_M, DESCRIPTORS)
                s = tl.dot(k1, q1_tile.T, s, input_precision="ieee")
            if P > 0:
                qp_tile = load_rows(q_pe_head, qp, b, h, start, S_q, stride_qps, 0, P, D_PE, BLOCK_M, DESCRIPTORS)
                s = tl.dot(kp, qp_tile.T, s, input_precision="ieee")

            # dP^T = V dO^T
            do0_tile = load_rows(do_head, do0, b, h, start, S_q, stride_dos, 0, V0, D_V, BLOCK_M, DESCRIPTORS)
            dp = tl.dot(v0, do0_tile.T, input_precision="ieee")
            if V1 > 0:
                do1_tile = load_rows(do_head, do1, b, h, start, S_q, stride_dos, V0, V1, D_V, BLOCK_M, DESCRIPTORS)
                dp = tl.dot(v1, do1_tile.T, dp, input_precision="ieee")

            # P^T and dS^T
            queries = start + offs_m
            row_lse = tl.load(lse + stats_row + queries, mask=queries < S_q, other=float("inf")) * LOG2E
            row_delta = tl.load(delta + stats_row + queries, mask=queries < S_q, other=0.0)
            if seed is not None:
                keep = kept(stream, c2, c3, last_dropped, start_n, start, BLOCK_N, BLOCK_M, True)
                dp = tl.where(keep, dp * keep_scale, 0.0)
            p, ds = _compute_p_ds(
                s, dp, row_lse[None, :], row_delta[None, :], (queries + S_k - S_q)[None, :], keys[:, None], scale,
                softcap, slope, is_partial, S_k, left, right, mask_data, b, h, LEFT, RIGHT, PROGRAM, MASKED, SOFTCAP,
                slopes is not None,
            )  # fmt: skip

            # dV += P^T dO, dK += dS^T Q
            if seed is not None:
                p = tl.where(keep, p, 0.0)
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

    # Scale dK, store dK and dV
    if seed is not None:
        dv0 *= keep_scale
        if V1 > 0:
            dv1 *= keep_scale
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
    dq, means, do, delta, q, k, v, lse, slopes, mask_data, counts, indices,  # dq, q: (B, H, S_q, D)   do: D_V
    B, H, group, S_q, S_k, left, right, scale, softcap, chunk,  # k, v: (B, H // group, S_k, .)   delta, lse: fp32
    stride_dqb, stride_dqh, stride_dqs, stride_dob, stride_doh, stride_dos, stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_table_b, stride_table_h, stride_table_m,
    dq_pe, q_pe, k_pe, stride_dqpb, stride_dqph, stride_dqps, stride_qpb, stride_qph, stride_qps,  # None where P is 0
    stride_kpb, stride_kph, stride_kps,
    seed, offset, last_dropped, keep_scale,  # as in the forward
    D: tl.constexpr, D_V: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    D_PE: tl.constexpr, P: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PROGRAM: tl.constexpr, SOFTCAP: tl.constexpr, RAGGED: tl.constexpr,
    DESCRIPTORS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dQ = scale * sum of dS K for one query tile of one head, over the key tiles that it sees.

    P > 0: as in the forward; dq_pe (B, H, S_q, D_PE).
    means: None, or (B, H, S_q) fp32: rowsum(P * dP), which is delta + dlse without the rounding of o.
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    MASKED: tl.constexpr = LEFT or RIGHT or RAGGED or PROGRAM != ""
    tile_m, head = schedule_tile(tl.program_id(0), tl.cdiv(S_q, BLOCK_M), B * H, chunk, RIGHT and not LEFT)
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

    # The key tiles to visit
    start_m = tile_m * BLOCK_M
    pos_first = start_m + S_k - S_q
    if PROGRAM != "":
        table_row = b * stride_table_b + h * stride_table_h + tile_m
        partial = tl.load(counts + table_row * 2)
        count = partial + tl.load(counts + table_row * 2 + 1)
        indices += table_row.to(tl.int64) * stride_table_m
    else:
        pos_last = tl.minimum(start_m + BLOCK_M, S_q) - 1 + S_k - S_q
        first, end, full_first, full_end = keys_of_tile(pos_first, pos_last, S_k, left, right, BLOCK_N, LEFT, RIGHT)
        count = tl.maximum(end - first, 0)

    # Load Q, dO, lse and delta
    q0 = load_rows(q, None, b, h, start_m, S_q, stride_qs, 0, D0, D, BLOCK_M, False)
    do0 = load_rows(do, None, b, h, start_m, S_q, stride_dos, 0, V0, D_V, BLOCK_M, False)
    dq0 = tl.zeros((BLOCK_M, D0), tl.float32)
    if D1 > 0:
        q1 = load_rows(q, None, b, h, start_m, S_q, stride_qs, D0, D1, D, BLOCK_M, False)
        dq1 = tl.zeros((BLOCK_M, D1), tl.float32)
    if V1 > 0:
        do1 = load_rows(do, None, b, h, start_m, S_q, stride_dos, V0, V1, D_V, BLOCK_M, False)
    if P > 0:
        q_pe += b.to(tl.int64) * stride_qpb + h.to(tl.int64) * stride_qph
        k_pe += b.to(tl.int64) * stride_kpb
        qp = load_rows(q_pe, None, b, h, start_m, S_q, stride_qps, 0, P, D_PE, BLOCK_M, False)
        dqp = tl.zeros((BLOCK_M, P), tl.float32)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    row = head.to(tl.int64) * S_q + offs_m
    row_lse = tl.load(lse + row, mask=offs_m < S_q, other=float("inf")) * LOG2E
    row_delta = tl.load(delta + row, mask=offs_m < S_q, other=0.0)
    positions = pos_first + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    slope = 0.0 if slopes is None else tl.load(slopes + h)
    if seed is not None:
        stream, c2, c3 = head_stream(seed, offset, b, h)
    if means is not None:
        mean = tl.zeros((BLOCK_M,), tl.float32)

    for n in tl.range(0, count):
        if PROGRAM != "":
            start = tl.load(indices + n).to(tl.int32) * BLOCK_N
            is_partial = n < partial
        else:
            start = (end - 1 - n) * BLOCK_N
            is_partial = (start < full_first * BLOCK_N) | (start >= full_end * BLOCK_N)

        # S = Q K^T
        k0_tile = load_rows(k, k0, b, h_kv, start, S_k, stride_ks, 0, D0, D, BLOCK_N, DESCRIPTORS)
        s = tl.dot(q0, k0_tile.T, input_precision="ieee")
        if D1 > 0:
            k1_tile = load_rows(k, k1, b, h_kv, start, S_k, stride_ks, D0, D1, D, BLOCK_N, DESCRIPTORS)
            s = tl.dot(q1, k1_tile.T, s, input_precision="ieee")
        if P > 0:
            kp_tile = load_rows(k_pe, kp, b, 0, start, S_k, stride_kps, 0, P, D_PE, BLOCK_N, DESCRIPTORS)
            s = tl.dot(qp, kp_tile.T, s, input_precision="ieee")

        # dP = dO V^T
        v_tile = load_rows(v, v0, b, h_kv, start, S_k, stride_vs, 0, V0, D_V, BLOCK_N, DESCRIPTORS)
        dp = tl.dot(do0, v_tile.T, input_precision="ieee")
        if V1 > 0:
            v_tile = load_rows(v, v1, b, h_kv, start, S_k, stride_vs, V0, V1, D_V, BLOCK_N, DESCRIPTORS)
            dp = tl.dot(do1, v_tile.T, dp, input_precision="ieee")

        # P and dS
        if seed is not None:
            keep = kept(stream, c2, c3, last_dropped, start_m, start, BLOCK_M, BLOCK_N, False)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        p, ds = _compute_p_ds(
            s, dp, row_lse[:, None], row_delta[:, None], positions[:, None], (start + offs_n)[None, :], scale, softcap,
            slope, is_partial, S_k, left, right, mask_data, b, h, LEFT, RIGHT, PROGRAM, MASKED, SOFTCAP,
            slopes is not None,
        )  # fmt: skip
        if means is not None:
            mean += tl.sum(p * dp, 1)

        # dQ += dS K
        ds = ds.to(DTYPE)
        dq0 = tl.dot(ds, k0_tile, dq0, input_precision="ieee")
        if D1 > 0:
            dq1 = tl.dot(ds, k1_tile, dq1, input_precision="ieee")
        if P > 0:
            dqp = tl.dot(ds, kp_tile, dqp, input_precision="ieee")

    dq += b.to(tl.int64) * stride_dqb + h.to(tl.int64) * stride_dqh
    # Scale and store dQ.  For a row without keys the accumulator may be 0 * NaN
    if means is not None:
        tl.store(means + row, tl.where(row_lse == float("-inf"), 0.0, mean), mask=offs_m < S_q)
    empty = (row_lse == float("-inf"))[:, None]
    store_rows(dq, tl.where(empty, 0.0, dq0 * scale), start_m, S_q, stride_dqs, 0, D)
    if D1 > 0:
        store_rows(dq, tl.where(empty, 0.0, dq1 * scale), start_m, S_q, stride_dqs, D0, D)
    if P > 0:
        dq_pe += b.to(tl.int64) * stride_dqpb + h.to(tl.int64) * stride_dqph
        store_rows(dq_pe, tl.where(empty, 0.0, dqp * scale), start_m, S_q, stride_dqps, 0, D_PE)
