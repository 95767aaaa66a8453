"""The kernel that merges three or more states of a stack, one program per row; `merge_states.py` explains it."""

import triton
import triton.language as tl

from tilewright.ops.attention.kernels.triton.merge_states_kernel import ANY_ALIGNMENT, indices, row_offsets, step
from tilewright.ops.exponential import exp


@triton.jit
def _logs(lse, i, N, stride_n):
    """lse (STATES,) of states i; -inf beyond the last state."""
    return tl.load(lse + i * step(stride_n), mask=i < N, other=float("-inf"))


@triton.jit
def _states(o, i, columns, D, N, stride_n):
    """o (STATES, BLOCK_D) of states i."""
    mask = (i < N)[:, None] & (columns < D)[None, :]
    return tl.load(o + (i * step(stride_n))[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _finite(m_i):
    """0 where no state saw a key: -inf - -inf would be NaN."""
    return tl.where(m_i == float("-inf"), 0.0, m_i)


@triton.jit
def _weighted(logs, states, m_i, denom):
    """sum_i w_i o_i (BLOCK_D,).  tl.where, because a state that saw no key may hold NaN."""
    weighted = states.to(tl.float32) * (exp(logs - m_i, True) / denom)[:, None]
    return tl.sum(tl.where((logs == float("-inf"))[:, None], 0.0, weighted), 0)


@triton.jit(do_not_specialize_on_alignment=ANY_ALIGNMENT)
def merge_stack_kernel(
    out, out_lse, o, lse, H, S, D, N,  # o: (N, B, H, S, D)   lse: (N, B, H, S)
    stride_n, stride_lse_n, stride_out_b, stride_out_h, stride_out_s, stride_b, stride_h, stride_s,
    stride_lse_b, stride_lse_h, stride_lse_s,
    BLOCK_D: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """out: (B, H, S, D)   out_lse: (B, H, S) contiguous   STATES: loaded together"""
    row = tl.program_id(0).to(tl.uint32)
    b, h, s = indices(row, H, S)
    o += row_offsets(b, h, s, stride_b, stride_h, stride_s)
    lse += row_offsets(b, h, s, stride_lse_b, stride_lse_h, stride_lse_s)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.arange(0, STATES)
    states = _states(o, first, columns, D, N, stride_n)

    # lse and its maximum and sum.  The first lse are loaded inside the loop too, so that no load moves across its head:
    # in one basic block ptxas, to save registers, loads the states only after lse has arrived, a second latency.
    m_i, l_i = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    for i in tl.range(0, N, STATES):
        logs = _logs(lse, first + i, N, stride_lse_n)
        higher = tl.maximum(m_i, tl.max(logs, 0))
        base = _finite(higher)
        l_i = l_i * exp(m_i - base, True) + tl.sum(exp(logs - base, True), 0)
        m_i = higher
    m_i = _finite(m_i)
    denom = tl.where(l_i == 0.0, 1.0, l_i)

    # o' = sum of weighted o
    acc = _weighted(_logs(lse, first, N, stride_lse_n), states, m_i, denom)
    for i in tl.range(STATES, N, STATES):
        states = _states(o, first + i, columns, D, N, stride_n)
        acc += _weighted(_logs(lse, first + i, N, stride_lse_n), states, m_i, denom)

    # Store
    out_offs = row_offsets(b, h, s, stride_out_b, stride_out_h, stride_out_s) + columns
    tl.store(out + out_offs, acc.to(out.dtype.element_ty), mask=columns < D)
    if tl.program_id(1) == 0:
        tl.store(out_lse + row, tl.where(l_i == 0.0, float("-inf"), m_i + tl.log(denom)))
