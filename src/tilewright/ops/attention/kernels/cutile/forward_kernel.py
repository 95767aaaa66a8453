"""The attention forward kernel in cuTile: one block per query tile, a loop over the key tiles.

tileiras builds the pipeline: a producer warpgroup loads by TMA, consumer warpgroups multiply (HGMMA on sm_90).  It also
splits the loop over keys into loops with and without the mask, because the mask's condition depends on the tile's
number alone.  Loads return 0 beyond an edge, and stores write nothing there.
"""

from tilewright.jit.cutile_language import ct
from tilewright.jit.cutile_launch import CutileKernel
from tilewright.ops.attention.kernels.cutile.tiles import LN2, LOG2E, load_rows, masked, schedule_tile, tiles_of_keys

LOWEST = -1.0e30  # below every score, and finite: a row without keys computes -inf - LOWEST


def _fmha_forward_kernel(
    o, lse, q, k, v, sinks, slopes,  # (B, H, S_q, D_v)  (B, H, S_q)  (B, H, S_q, D)  (B, H_kv, S_k, D | D_v)  (H,)
    scale_log2, cap, left, right, chunk,
    D: ct.Constant[int], D_V: ct.Constant[int], BLOCK_M: ct.Constant[int], BLOCK_N: ct.Constant[int],
    LEFT: ct.Constant[bool], RIGHT: ct.Constant[bool], RAGGED: ct.Constant[bool], MODIFIED: ct.Constant[bool],
    CAPPED: ct.Constant[bool], SLOPES: ct.Constant[bool], SINKS: ct.Constant[bool], AHEAD: ct.Constant[bool],
):  # fmt: skip
    # Scores, slope and cap are in units of log2.  MODIFIED: scores are scaled before the softmax, else inside exp2.
    # AHEAD: issue the next S = Q K^T before the softmax of this one.
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

    # Initial m_i, l_i and acc
    m_i = ct.full((BLOCK_M, 1), LOWEST, ct.float32)
    l_i = ct.zeros((BLOCK_M, 1), ct.float32)
    if SINKS:  # a sink is one more key, without a value
        sink = m_i * 0.0 + ct.load(sinks, (h,), shape=()) * LOG2E
        m_i = ct.maximum(sink, m_i)
        l_i = ct.exp2(sink - m_i, flush_to_zero=True)
    acc = ct.zeros((BLOCK_M, D_V), ct.float32)
    query = load_rows(q, b, h, m, BLOCK_M, D)
    s = ct.zeros((BLOCK_M, BLOCK_N), ct.float32)
    s_next = s
    if AHEAD:
        s = _scores(query, k, b, kv, max(0, min(begin, end - 1)), BLOCK_N)

    for n in range(begin, end):
        # S = Q K^T
        if AHEAD:
            s_next = _scores(query, k, b, kv, min(n + 1, end - 1), BLOCK_N)
        else:
            s = _scores(query, k, b, kv, n, BLOCK_N)

        # Softcap, ALiBi, mask
        keys = n * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32)[None, :]
        if MODIFIED:
            s = _modified(s * scale_log2, positions, keys, cap, slope, CAPPED, SLOPES)
        if (LEFT or RIGHT or RAGGED) and (n < full or n >= full_end):
            s = masked(s, -float("inf"), positions, keys, left, right, s_k, LEFT, RIGHT, RAGGED)

        # Online softmax
        if MODIFIED:
            m_new = ct.maximum(m_i, ct.max(s, axis=1, keepdims=True))
            p = ct.exp2(s - m_new, flush_to_zero=True)
        else:
            m_new = ct.maximum(m_i, ct.max(s, axis=1, keepdims=True) * scale_log2)
            p = ct.exp2(s * scale_log2 - m_new, flush_to_zero=True)
        alpha = ct.exp2(m_i - m_new, flush_to_zero=True)
        l_i = l_i * alpha + ct.sum(p, axis=1, keepdims=True)

        # O += P V
        acc = ct.mma(p.astype(v.dtype), load_rows(v, b, kv, n, BLOCK_N, D_V), acc * alpha)
        m_i = m_new
        if AHEAD:
            s = s_next

    # Normalise, write o and lse
    empty = l_i == 0.0
    divisor = ct.where(empty, 1.0, l_i)
    acc = ct.truediv(acc, divisor, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    ct.store(o, (b, h, m, 0), acc.astype(o.dtype).reshape((1, 1, BLOCK_M, D_V)))
    row_lse = ct.where(empty, -float("inf"), (m_i + ct.log2(divisor)) * LN2)
    ct.store(lse, (b, h, m), row_lse.reshape((1, 1, BLOCK_M)), allow_tma=False)


def _scores(query, k, b, kv, n, BLOCK_N):
    """S = query (M, D) times key tile n, (M, BLOCK_N) float32."""
    M, D = query.shape
    key = load_rows(k, b, kv, n, BLOCK_N, D)
    return ct.mma(query, ct.transpose(key), ct.zeros((M, BLOCK_N), ct.float32))


def _modified(s, positions, keys, cap, slope, CAPPED, SLOPES):
    """Scores after softcap and ALiBi."""
    if CAPPED:
        s = ct.tanh(s * (1.0 / cap), rounding_mode=ct.RoundingMode.APPROX) * cap
    if SLOPES:
        s = s - slope * ct.abs(positions - keys).astype(ct.float32)
    return s


forward_kernel = CutileKernel(_fmha_forward_kernel)
