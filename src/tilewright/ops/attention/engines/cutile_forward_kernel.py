"""The attention forward kernel in cuTile: a tile of queries stays, tiles of keys and values pass by.

tileiras makes the pipeline of it: a warp group that only loads, through the copy engine, and warpgroups that multiply
(HGMMA on sm_90).  It also makes loops without the mask of the loop over keys, since the condition of the mask depends
on the tile's number alone.  Beyond an edge loads give 0, and stores write nothing.
"""

from tilewright.jit.cutile_language import ct
from tilewright.jit.cutile_launch import CutileKernel
from tilewright.ops.attention.engines.cutile_tiles import LN2, LOG2E, masked, place, rows, tiles_of_keys

LOWEST = -1.0e30  # under every score, and finite: a row without keys subtracts it from -inf


def _fmha_forward_kernel(
    o, lse, q, k, v, sinks, slopes,  # (B, H, S_q, D_v)  (B, H, S_q)  (B, H, S_q, D)  (B, H_kv, S_k, D | D_v)  (H,)
    scale_log2, cap, left, right, together,
    D: ct.Constant[int], D_V: ct.Constant[int], BLOCK_M: ct.Constant[int], BLOCK_N: ct.Constant[int],
    LEFT: ct.Constant[bool], RIGHT: ct.Constant[bool], RAGGED: ct.Constant[bool], MODIFIED: ct.Constant[bool],
    CAPPED: ct.Constant[bool], SLOPES: ct.Constant[bool], SINKS: ct.Constant[bool], AHEAD: ct.Constant[bool],
):  # fmt: skip
    # Everything is in units of log2; cap, too.  MODIFIED: scores are finished before the softmax sees them, else the
    # scale joins the exponent.  AHEAD: the next scores are multiplied while these pass through the softmax.
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
    top = ct.full((BLOCK_M, 1), LOWEST, ct.float32)
    total = ct.zeros((BLOCK_M, 1), ct.float32)
    if SINKS:  # a sink is a key that was seen first, without a value
        sink = top * 0.0 + ct.load(sinks, (h,), shape=()) * LOG2E
        top = ct.maximum(sink, top)
        total = ct.exp2(sink - top, flush_to_zero=True)
    acc = ct.zeros((BLOCK_M, D_V), ct.float32)
    query = rows(q, b, h, m, BLOCK_M, D)
    s = ct.zeros((BLOCK_M, BLOCK_N), ct.float32)
    ahead = s
    if AHEAD:
        s = _scores(query, k, b, kv, max(0, min(begin, end - 1)), BLOCK_N)
    for n in range(begin, end):
        if AHEAD:
            ahead = _scores(query, k, b, kv, min(n + 1, end - 1), BLOCK_N)
        else:
            s = _scores(query, k, b, kv, n, BLOCK_N)
        keys = n * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32)[None, :]
        if MODIFIED:
            s = _modified(s * scale_log2, positions, keys, cap, slope, CAPPED, SLOPES)
        if (LEFT or RIGHT or RAGGED) and (n < full or n >= full_end):
            s = masked(s, -float("inf"), positions, keys, left, right, s_k, LEFT, RIGHT, RAGGED)
        if MODIFIED:
            above = ct.maximum(top, ct.max(s, axis=1, keepdims=True))
            p = ct.exp2(s - above, flush_to_zero=True)
        else:
            above = ct.maximum(top, ct.max(s, axis=1, keepdims=True) * scale_log2)
            p = ct.exp2(s * scale_log2 - above, flush_to_zero=True)
        shrink = ct.exp2(top - above, flush_to_zero=True)
        total = total * shrink + ct.sum(p, axis=1, keepdims=True)
        acc = ct.mma(p.astype(v.dtype), rows(v, b, kv, n, BLOCK_N, D_V), acc * shrink)
        top = above
        if AHEAD:
            s = ahead
    empty = total == 0.0
    divisor = ct.where(empty, 1.0, total)
    acc = ct.truediv(acc, divisor, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    ct.store(o, (b, h, m, 0), acc.astype(o.dtype).reshape((1, 1, BLOCK_M, D_V)))
    log = ct.where(empty, -float("inf"), (top + ct.log2(divisor)) * LN2)
    ct.store(lse, (b, h, m), log.reshape((1, 1, BLOCK_M)), allow_tma=False)


def _scores(query, k, b, kv, n, BLOCK_N):
    """query (M, D) times tile n of the keys, (M, BLOCK_N) float32."""
    M, D = query.shape
    key = rows(k, b, kv, n, BLOCK_N, D)
    return ct.mma(query, ct.transpose(key), ct.zeros((M, BLOCK_N), ct.float32))


def _modified(s, positions, keys, cap, slope, CAPPED, SLOPES):
    """Scores after softcap and slopes."""
    if CAPPED:
        s = ct.tanh(s * (1.0 / cap), rounding_mode=ct.RoundingMode.APPROX) * cap
    if SLOPES:
        s = s - slope * ct.abs(positions - keys).astype(ct.float32)
    return s


forward_kernel = CutileKernel(_fmha_forward_kernel)
