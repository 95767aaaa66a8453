"""The attention backward kernels in cuTile, each deterministic: every sum is a loop in one block.

    P  = exp(S - lse)           S = scale * Q K^T, softcapped, minus the ALiBi slope, masked
    dV = P^T dO
    dP = dO V^T
    dS = P * (dP - delta)       delta = rowsum(dO * O) - dlse; with a softcap, times its derivative
    dQ = scale * dS K
    dK = scale * dS^T Q

`queries_kernel` has one block per query tile and writes dQ and delta.  `keys_kernel` has one block per key tile of one
kv head, loops over the query tiles of all its heads, and writes dK and dV; it computes S^T and dP^T, so that P^T and
dS^T are left operands in registers.  `sinks_kernel` sums the gradient of the sinks.  Loads return 0 beyond an edge, so
queries beyond S_q add nothing.
"""

from tilewright.jit.cutile_language import ct
from tilewright.jit.cutile_launch import CutileKernel
from tilewright.ops.attention.kernels.cutile.tiles import (
    LOG2E,
    load_row_stats,
    load_rows,
    masked,
    schedule_tile,
    tiles_of_keys,
    tiles_of_queries,
)


def _fmha_queries_kernel(
    dq, delta, do, o, dlse, q, k, v, lse, slopes,  # dlse, lse, delta: (B, H, S_q)
    scale, inner, cap, left, right, chunk,
    D: ct.Constant[int], D_V: ct.Constant[int], BLOCK_M: ct.Constant[int], BLOCK_N: ct.Constant[int],
    LEFT: ct.Constant[bool], RIGHT: ct.Constant[bool], RAGGED: ct.Constant[bool], CAPPED: ct.Constant[bool],
    SLOPES: ct.Constant[bool], DLSE: ct.Constant[bool],
):  # fmt: skip
    tiles, s_k = ct.cdiv(q.shape[2], BLOCK_M), k.shape[2]
    from_last, b, h = schedule_tile(ct.bid(0), tiles, q, chunk)
    m = tiles - 1 - from_last  # the last tiles first: they have most keys under a causal mask
    kv = h // (q.shape[1] // k.shape[1])
    first = m * BLOCK_M + s_k - q.shape[2]
    begin, full, full_end, end = tiles_of_keys(first, s_k, left, right, BLOCK_M, BLOCK_N, LEFT, RIGHT)
    positions = first + ct.arange(BLOCK_M, dtype=ct.int32)[:, None]
    slope = 0.0
    if SLOPES:
        slope = ct.load(slopes, (h,), shape=()) * LOG2E

    # delta
    grad = load_rows(do, b, h, m, BLOCK_M, D_V)
    out = load_rows(o, b, h, m, BLOCK_M, D_V)
    row_delta = ct.sum(grad.astype(ct.float32) * out.astype(ct.float32), axis=1, keepdims=True)
    if DLSE:
        row_delta = row_delta - load_row_stats(dlse, b, h, m, BLOCK_M)[:, None]
    ct.store(delta, (b, h, m), row_delta.reshape((1, 1, BLOCK_M)), allow_tma=False)

    # Load Q and lse
    row_lse = load_row_stats(lse, b, h, m, BLOCK_M)[:, None] * LOG2E
    query = load_rows(q, b, h, m, BLOCK_M, D)
    acc = ct.zeros((BLOCK_M, D), ct.float32)
    for n in range(begin, end):
        # S = Q K^T, dP = dO V^T
        key, value = load_rows(k, b, kv, n, BLOCK_N, D), load_rows(v, b, kv, n, BLOCK_N, D_V)
        s = ct.mma(query, ct.transpose(key), ct.zeros((BLOCK_M, BLOCK_N), ct.float32))
        dp = ct.mma(grad, ct.transpose(value), ct.zeros((BLOCK_M, BLOCK_N), ct.float32))

        # P and dS
        keys = n * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32)[None, :]
        p, derivative = _probabilities(s, row_lse, positions, keys, inner, cap, slope, CAPPED, SLOPES)
        ds = p * (dp - row_delta) * derivative
        if (LEFT or RIGHT or RAGGED) and (n < full or n >= full_end):
            ds = masked(ds, 0.0, positions, keys, left, right, s_k, LEFT, RIGHT, RAGGED)

        # dQ += dS K
        acc = ct.mma(ds.astype(k.dtype), key, acc)
    ct.store(dq, (b, h, m, 0), (acc * scale).astype(dq.dtype).reshape((1, 1, BLOCK_M, D)))


def _fmha_keys_kernel(
    dk, dv, do, q, k, v, lse, delta, slopes,
    scale, inner, cap, left, right, chunk,
    D: ct.Constant[int], D_V: ct.Constant[int], BLOCK_M: ct.Constant[int], BLOCK_N: ct.Constant[int],
    LEFT: ct.Constant[bool], RIGHT: ct.Constant[bool], CAPPED: ct.Constant[bool], SLOPES: ct.Constant[bool],
):  # fmt: skip
    n, b, kv = schedule_tile(ct.bid(0), ct.cdiv(k.shape[2], BLOCK_N), k, chunk)
    group, shift = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    begin, full, full_end, end = tiles_of_queries(
        n * BLOCK_N - shift, q.shape[2], left, right, BLOCK_M, BLOCK_N, LEFT, RIGHT
    )
    keys = n * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32)[:, None]
    key, value = load_rows(k, b, kv, n, BLOCK_N, D), load_rows(v, b, kv, n, BLOCK_N, D_V)
    dk_acc = ct.zeros((BLOCK_N, D), ct.float32)
    dv_acc = ct.zeros((BLOCK_N, D_V), ct.float32)
    for i in range(group):
        h = kv * group + i
        slope = 0.0
        if SLOPES:
            slope = ct.load(slopes, (h,), shape=()) * LOG2E
        for m in range(begin, end):
            # S^T = K Q^T, dP^T = V dO^T
            query, grad = load_rows(q, b, h, m, BLOCK_M, D), load_rows(do, b, h, m, BLOCK_M, D_V)
            s = ct.mma(key, ct.transpose(query), ct.zeros((BLOCK_N, BLOCK_M), ct.float32))
            dp = ct.mma(value, ct.transpose(grad), ct.zeros((BLOCK_N, BLOCK_M), ct.float32))

            # P^T and dS^T
            row_lse, row_delta = (
                load_row_stats(lse, b, h, m, BLOCK_M)[None, :] * LOG2E,
                load_row_stats(delta, b, h, m, BLOCK_M)[None, :],
            )
            positions = m * BLOCK_M + shift + ct.arange(BLOCK_M, dtype=ct.int32)[None, :]
            p, derivative = _probabilities(s, row_lse, positions, keys, inner, cap, slope, CAPPED, SLOPES)
            ds = p * (dp - row_delta) * derivative
            if (LEFT or RIGHT) and (m < full or m >= full_end):
                p = masked(p, 0.0, positions, keys, left, right, 0, LEFT, RIGHT, False)
                ds = ct.where(p == 0.0, 0.0, ds)

            # dV += P^T dO, dK += dS^T Q
            dv_acc = ct.mma(p.astype(do.dtype), grad, dv_acc)
            dk_acc = ct.mma(ds.astype(q.dtype), query, dk_acc)
    ct.store(dk, (b, kv, n, 0), (dk_acc * scale).astype(dk.dtype).reshape((1, 1, BLOCK_N, D)))
    ct.store(dv, (b, kv, n, 0), dv_acc.astype(dv.dtype).reshape((1, 1, BLOCK_N, D_V)))


def _probabilities(s, row_lse, positions, keys, inner, cap, slope, CAPPED, SLOPES):
    """P and the derivative of the softcap, from s = Q K^T and lse in units of log2.

    inner: scale / softcap, or scale * log2(e) without one.  A row without keys has lse = -inf and gets NaN, and masked
    scores may: the mask is applied later.
    """
    derivative = 1.0
    if CAPPED:
        capped = ct.tanh(s * inner, rounding_mode=ct.RoundingMode.APPROX)
        s, derivative = capped * cap, 1.0 - capped * capped
    else:
        s = s * inner
    if SLOPES:
        s = s - slope * ct.abs(positions - keys).astype(ct.float32)
    return ct.exp2(s - row_lse, flush_to_zero=True), derivative


def _fmha_sinks_kernel(dsinks, delta, lse, sinks, BLOCK: ct.Constant[int]):
    """dsinks[h] = -sum of exp(sinks[h] - lse) * delta over batch and queries, block by block."""
    h = ct.bid(0)
    sink = ct.load(sinks, (h,), shape=())
    acc = ct.zeros((BLOCK,), ct.float32)
    for b in range(lse.shape[0]):
        for tile in range(ct.cdiv(lse.shape[2], BLOCK)):
            offs = tile * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
            row_lse = ct.gather(lse, (b, h, offs), padding_value=float("inf"))
            # lse >= sink; a row with only a sink of -inf has probability 0
            p_sink = ct.where(row_lse == -float("inf"), 0.0, ct.exp2((sink - row_lse) * LOG2E, flush_to_zero=True))
            acc = acc + p_sink * ct.gather(delta, (b, h, offs), padding_value=0.0)
    ct.scatter(dsinks, (h,), -ct.sum(acc))


queries_kernel = CutileKernel(_fmha_queries_kernel)
keys_kernel = CutileKernel(_fmha_keys_kernel)
sinks_kernel = CutileKernel(_fmha_sinks_kernel)
