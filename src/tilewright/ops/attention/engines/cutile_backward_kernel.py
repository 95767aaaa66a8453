"""The attention backward kernels in cuTile, each deterministic: the order of every sum is that of a loop.

`queries_kernel` keeps a tile of queries, passes over its keys and leaves dq, and delta = rowsum(do * o) - dlse on the
way.  `keys_kernel` keeps a tile of keys, passes over the queries that see it, of every head that reads them, and leaves
dk and dv.  Its scores are transposed: p and ds come out of the matrix unit as it wants its left operands, in registers.
`sinks_kernel` adds up what is left.  Beyond an edge loads give 0: queries that are not there change nothing.
"""

from tilewright.jit.cutile_language import ct
from tilewright.jit.cutile_launch import CutileKernel
from tilewright.ops.attention.engines.cutile_tiles import (
    LOG2E,
    line,
    masked,
    place,
    rows,
    tiles_of_keys,
    tiles_of_queries,
)


def _fmha_queries_kernel(
    dq, delta, do, o, dlse, q, k, v, lse, slopes,  # dlse, lse, delta: (B, H, S_q)
    scale, inner, cap, left, right, together,
    D: ct.Constant[int], D_V: ct.Constant[int], BLOCK_M: ct.Constant[int], BLOCK_N: ct.Constant[int],
    LEFT: ct.Constant[bool], RIGHT: ct.Constant[bool], RAGGED: ct.Constant[bool], CAPPED: ct.Constant[bool],
    SLOPES: ct.Constant[bool], DLSE: ct.Constant[bool],
):  # fmt: skip
    tiles, s_k = ct.cdiv(q.shape[2], BLOCK_M), k.shape[2]
    from_last, b, h = place(ct.bid(0), tiles, q, together)
    m = tiles - 1 - from_last  # the last tiles first, which have most keys under a causal mask
    kv = h // (q.shape[1] // k.shape[1])
    first = m * BLOCK_M + s_k - q.shape[2]
    begin, full, full_end, end = tiles_of_keys(first, s_k, left, right, BLOCK_M, BLOCK_N, LEFT, RIGHT)
    positions = first + ct.arange(BLOCK_M, dtype=ct.int32)[:, None]
    slope = 0.0
    if SLOPES:
        slope = ct.load(slopes, (h,), shape=()) * LOG2E
    grad = rows(do, b, h, m, BLOCK_M, D_V)
    out = rows(o, b, h, m, BLOCK_M, D_V)
    mean = ct.sum(grad.astype(ct.float32) * out.astype(ct.float32), axis=1, keepdims=True)
    if DLSE:
        mean = mean - line(dlse, b, h, m, BLOCK_M)[:, None]
    ct.store(delta, (b, h, m), mean.reshape((1, 1, BLOCK_M)), allow_tma=False)
    log = line(lse, b, h, m, BLOCK_M)[:, None] * LOG2E
    query = rows(q, b, h, m, BLOCK_M, D)
    acc = ct.zeros((BLOCK_M, D), ct.float32)
    for n in range(begin, end):
        key, value = rows(k, b, kv, n, BLOCK_N, D), rows(v, b, kv, n, BLOCK_N, D_V)
        s = ct.mma(query, ct.transpose(key), ct.zeros((BLOCK_M, BLOCK_N), ct.float32))
        dp = ct.mma(grad, ct.transpose(value), ct.zeros((BLOCK_M, BLOCK_N), ct.float32))
        keys = n * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32)[None, :]
        p, slant = _probabilities(s, log, positions, keys, inner, cap, slope, CAPPED, SLOPES)
        ds = p * (dp - mean) * slant
        if (LEFT or RIGHT or RAGGED) and (n < full or n >= full_end):
            ds = masked(ds, 0.0, positions, keys, left, right, s_k, LEFT, RIGHT, RAGGED)
        acc = ct.mma(ds.astype(k.dtype), key, acc)
    ct.store(dq, (b, h, m, 0), (acc * scale).astype(dq.dtype).reshape((1, 1, BLOCK_M, D)))


def _fmha_keys_kernel(
    dk, dv, do, q, k, v, lse, delta, slopes,
    scale, inner, cap, left, right, together,
    D: ct.Constant[int], D_V: ct.Constant[int], BLOCK_M: ct.Constant[int], BLOCK_N: ct.Constant[int],
    LEFT: ct.Constant[bool], RIGHT: ct.Constant[bool], CAPPED: ct.Constant[bool], SLOPES: ct.Constant[bool],
):  # fmt: skip
    n, b, kv = place(ct.bid(0), ct.cdiv(k.shape[2], BLOCK_N), k, together)
    sharing, shift = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    begin, full, full_end, end = tiles_of_queries(
        n * BLOCK_N - shift, q.shape[2], left, right, BLOCK_M, BLOCK_N, LEFT, RIGHT
    )
    keys = n * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32)[:, None]
    key, value = rows(k, b, kv, n, BLOCK_N, D), rows(v, b, kv, n, BLOCK_N, D_V)
    dk_acc = ct.zeros((BLOCK_N, D), ct.float32)
    dv_acc = ct.zeros((BLOCK_N, D_V), ct.float32)
    for i in range(sharing):
        h = kv * sharing + i
        slope = 0.0
        if SLOPES:
            slope = ct.load(slopes, (h,), shape=()) * LOG2E
        for m in range(begin, end):
            query, grad = rows(q, b, h, m, BLOCK_M, D), rows(do, b, h, m, BLOCK_M, D_V)
            s = ct.mma(key, ct.transpose(query), ct.zeros((BLOCK_N, BLOCK_M), ct.float32))
            dp = ct.mma(value, ct.transpose(grad), ct.zeros((BLOCK_N, BLOCK_M), ct.float32))
            log, mean = line(lse, b, h, m, BLOCK_M)[None, :] * LOG2E, line(delta, b, h, m, BLOCK_M)[None, :]
            positions = m * BLOCK_M + shift + ct.arange(BLOCK_M, dtype=ct.int32)[None, :]
            p, slant = _probabilities(s, log, positions, keys, inner, cap, slope, CAPPED, SLOPES)
            ds = p * (dp - mean) * slant
            if (LEFT or RIGHT) and (m < full or m >= full_end):
                p = masked(p, 0.0, positions, keys, left, right, 0, LEFT, RIGHT, False)
                ds = ct.where(p == 0.0, 0.0, ds)
            dv_acc = ct.mma(p.astype(do.dtype), grad, dv_acc)
            dk_acc = ct.mma(ds.astype(q.dtype), query, dk_acc)
    ct.store(dk, (b, kv, n, 0), (dk_acc * scale).astype(dk.dtype).reshape((1, 1, BLOCK_N, D)))
    ct.store(dv, (b, kv, n, 0), dv_acc.astype(dv.dtype).reshape((1, 1, BLOCK_N, D_V)))


def _probabilities(s, log, positions, keys, inner, cap, slope, CAPPED, SLOPES):
    """(p, what the softcap leaves of a score's gradient), of products s and the logarithm of their sum to base 2.

    inner: scale / softcap, or scale * log2(e) without one.  A row without keys has a log of -inf and gets NaN, as what
    is forbidden may: the mask comes later.
    """
    slant = 1.0
    if CAPPED:
        capped = ct.tanh(s * inner, rounding_mode=ct.RoundingMode.APPROX)
        s, slant = capped * cap, 1.0 - capped * capped
    else:
        s = s * inner
    if SLOPES:
        s = s - slope * ct.abs(positions - keys).astype(ct.float32)
    return ct.exp2(s - log, flush_to_zero=True), slant


def _fmha_sinks_kernel(dsinks, delta, lse, sinks, BLOCK: ct.Constant[int]):
    """dsinks[h] = -sum of e^(sinks[h] - lse) * delta over batch and queries, block by block."""
    h = ct.bid(0)
    sink = ct.load(sinks, (h,), shape=())
    total = ct.zeros((BLOCK,), ct.float32)
    for b in range(lse.shape[0]):
        for tile in range(ct.cdiv(lse.shape[2], BLOCK)):
            places = tile * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
            log = ct.gather(lse, (b, h, places), padding_value=float("inf"))
            # lse is at least the sink: a row that has only a sink of -inf gives it no share
            share = ct.where(log == -float("inf"), 0.0, ct.exp2((sink - log) * LOG2E, flush_to_zero=True))
            total = total + share * ct.gather(delta, (b, h, places), padding_value=0.0)
    ct.scatter(dsinks, (h,), -ct.sum(total))


queries_kernel = CutileKernel(_fmha_queries_kernel)
keys_kernel = CutileKernel(_fmha_keys_kernel)
sinks_kernel = CutileKernel(_fmha_sinks_kernel)
