"""Maximum, sum of exponentials and sum of the logits of a row, and its loss.

Columns are spread over the threads, a 16-byte vector each, and every lane keeps its own running maximum and sum, so
that nothing is exchanged before the end of the row.
"""

import triton
import triton.language as tl

from tilewright.ops.exponential import exp, log
from tilewright.ops.opaque import opaque_fp32
from tilewright.ops.reduction.kernels.triton.packed_rows import LOWEST


@triton.jit
def capped(x, softcap, SOFTCAP: tl.constexpr, PRECISE: tl.constexpr):
    """softcap * tanh(x / softcap), and tanh itself, of float32 logits by a polynomial near 0 and by e^2|u| elsewhere,
    where it does not cancel (tanhf of the Cephes library, Moshier, 1987).  Of 16-bit logits by e^2u alone: what cancels
    near 0 is a float32 rounding of 1, less than their own.

    The fast exponential and division are enough: an error of e^2|u| weighs a third of it in tanh, and less the larger.
    """
    t = x
    if SOFTCAP:
        u = x * tl.minimum(tl.div_rn(1.0, softcap), -LOWEST)  # finite, so that a logit of 0 stays 0
        if PRECISE:
            a, s = tl.abs(u), u * u
            p = s * -5.70498872745e-3 + 2.06390887954e-2
            p = p * s - 5.37397155531e-2
            p = p * s + 1.33314422036e-1
            p = p * s - 3.33332819422e-1
            near = u + u * (s * p)
            far = 1.0 - 2.0 / (exp(2.0 * a, False) + 1.0)
            t = tl.where(a < 0.625, near, tl.where(u < 0, -far, far))
        else:
            t = 1.0 - 2.0 / (exp(2.0 * u, False) + 1.0)
        x = softcap * t
    return x, t


@triton.jit
def head_and_body(start, N, VECTOR: tl.constexpr, ALIGNED: tl.constexpr):
    """Columns before the first 16-byte boundary of a row that begins at element `start`, whole vectors after them, and
    where those begin.  ALIGNED: the compiler knows that rows are whole vectors.
    """
    if ALIGNED:
        head, body, begin = 0, N, start
    else:
        begin = (start + (VECTOR - 1)) // VECTOR * VECTOR
        head = (begin - start).to(tl.int32)
        head = tl.minimum(head, N)
        body = (N - head) // VECTOR * VECTOR
    return head, body, begin


@triton.jit
def edges(head, body, N, VECTOR: tl.constexpr):
    """Columns of head and tail, and which of them exist."""
    index = tl.arange(0, 2 * VECTOR)
    columns = tl.where(index < VECTOR, index, index - VECTOR + head + body)
    return columns, tl.where(index < VECTOR, index < head, columns < N)


@triton.jit
def absorb(
    m_i, l_i, s_i, w_i, raw, mask, weights, softcap,
    SOFTCAP: tl.constexpr, SMOOTH: tl.constexpr, WEIGHTED: tl.constexpr, PRECISE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Add a tile to the running maximum, sum of exponentials, weighted sum and sum of weights of every lane."""
    part, _ = capped(raw.to(tl.float32), softcap, SOFTCAP, PRECISE)
    if SOFTCAP:
        part = tl.where(mask, part, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(part, 0))
    if PACKED:
        part, _ = capped(opaque_fp32(raw, PACKED), softcap, SOFTCAP, PRECISE)
        if SOFTCAP:
            part = tl.where(mask, part, float("-inf"))
    l_i = l_i * exp(m_i - m_new, PRECISE) + tl.sum(exp(part - m_new[None, :], PRECISE), 0)
    if SMOOTH:
        if WEIGHTED:
            w = tl.load(weights, mask=mask, other=0.0).to(tl.float32)
            w_i += tl.sum(w, 0)
            part *= w
        s_i += tl.sum(tl.where(mask, part, 0.0), 0)
    return m_new, l_i, s_i, w_i


@triton.jit
def row_statistics(
    x, held, weight, start, N, is_row, softcap,
    STEPS: tl.constexpr, LANES: tl.constexpr, NUM_STAGES: tl.constexpr, ALIGNED: tl.constexpr,
    SOFTCAP: tl.constexpr, SMOOTH: tl.constexpr, WEIGHTED: tl.constexpr, KEEP: tl.constexpr, HELD: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Maximum, sum of exponentials, weighted sum of the logits and sum of weights of the row at element `start`.

    held: its first HELD columns after the head.   KEEP: the rest is read again: leave it in the L2.   Sums of weights
    are made for SMOOTH alone.
    """
    PRECISE: tl.constexpr = x.dtype.element_ty == tl.float32
    VECTOR: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    POLICY: tl.constexpr = "" if KEEP else "evict_first"
    head, body, begin = head_and_body(start, N, VECTOR, ALIGNED)
    offs = tl.arange(0, STEPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    m_i = tl.full((LANES,), LOWEST, tl.float32)
    l_i = tl.zeros((LANES,), tl.float32)
    s_i = tl.zeros((LANES,), tl.float32)
    w_i = tl.zeros((LANES,), tl.float32)
    end = tl.where(is_row, body, 0)
    if HELD:
        offs_held = tl.arange(0, HELD // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        m_i, l_i, s_i, w_i = absorb(
            m_i, l_i, s_i, w_i, held, offs_held < end, weight + head + offs_held, softcap,
            SOFTCAP, SMOOTH, WEIGHTED, PRECISE, PACKED,
        )  # fmt: skip
    for first in tl.range(HELD, end, STEPS * LANES, num_stages=NUM_STAGES):
        mask = offs < end - first
        part = tl.load(x + begin + first + offs, mask=mask, other=float("-inf"), eviction_policy=POLICY)
        m_i, l_i, s_i, w_i = absorb(
            m_i, l_i, s_i, w_i, part, mask, weight + head + first + offs, softcap,
            SOFTCAP, SMOOTH, WEIGHTED, PRECISE, False,
        )  # fmt: skip
    row_max = tl.max(m_i, 0)
    if not ALIGNED:
        columns, mask = edges(head, body, N, VECTOR)
        mask &= is_row
        edge = tl.load(x + start + columns, mask=mask, other=float("-inf")).to(tl.float32)
        edge, _ = capped(edge, softcap, SOFTCAP, PRECISE)
        edge = tl.where(mask, edge, float("-inf"))
        row_max = tl.maximum(row_max, tl.max(edge, 0))
    total = tl.sum(l_i * exp(m_i - row_max, PRECISE), 0)
    weighted, weights = tl.sum(s_i, 0), tl.sum(w_i, 0)
    if not ALIGNED:
        total += tl.sum(exp(edge - row_max, PRECISE), 0)
        if SMOOTH:
            if WEIGHTED:
                w = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
                weights += tl.sum(w, 0)
                edge *= w
            weighted += tl.sum(tl.where(mask, edge, 0.0), 0)
    if not WEIGHTED:
        weights = N * 1.0
    return row_max, total, weighted, weights


@triton.jit
def target_of(target, weight, row, N, ignore_index, WEIGHTED: tl.constexpr):
    """The row's class, is it a row (not ignored), is the class one, and the class's weight."""
    t = tl.load(target + row).to(tl.int64)
    is_row = t != ignore_index
    is_class = is_row & (t >= 0) & (t < N)
    w_t = 1.0
    if WEIGHTED:
        w_t = tl.load(weight + t, mask=is_class, other=float("nan")).to(tl.float32)
    return t, is_row, is_class, w_t


@triton.jit
def row_loss(
    x_t, w_t, row_max, total, weighted, weights, N, smoothing, SMOOTH: tl.constexpr,
):  # fmt: skip
    """The cross entropy of a row, from its statistics; and its logsumexp."""
    log_total = log(total)
    loss = w_t * ((row_max - x_t) + log_total)
    lse = row_max + log_total
    if SMOOTH:
        loss = (1.0 - smoothing) * loss + smoothing / (N * 1.0) * (weights * lse - weighted)
    return loss, lse
