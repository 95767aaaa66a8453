"""The kernels that merge states of attention, forward and backward; `merge_states.py` explains them.

o'      = sum_i w_i o_i         w_i = exp(lse_i - lse')
lse'    = log(sum_i exp(lse_i))
d_o_i   = w_i do
d_lse_i = w_i (do . o_i - sum_j w_j do . o_j + dlse)
"""

import triton
import triton.language as tl

from tilewright.ops.exponential import exp

UNROLL = tl.constexpr(4)  # loads of lse in flight at once

# Sizes, and strides of lse, which is loaded by element: specialising on multiples of 16 gives the same kernel
ANY_ALIGNMENT = (
    *("M", "H", "S", "N", "N_OTHER", "begin_other_lse", "begin_dother_lse"),
    *(f"stride_{name}_{dim}" for name in ("lse", "other_lse") for dim in "nbhs"),
)


@triton.jit
def rows(M, ROWS: tl.constexpr):
    """Indices of this program's rows, 64-bit only if M needs it: a 64-bit division costs three 32-bit ones."""
    if (tl.full([], 1, tl.int32) * M).dtype == tl.int64:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    else:
        row = tl.program_id(0).to(tl.uint32) * ROWS + tl.arange(0, ROWS).to(tl.uint32)
    return row


@triton.jit
def indices(row, H, S):
    """(b, h, s) of rows `row` of (B, H, S).  Sizes of 1 are constants, so they cost no division."""
    one = tl.full([], 1, row.dtype)
    over = row // (one * S)
    return (over // (one * H)).to(tl.int64), (over % (one * H)).to(tl.int64), (row % (one * S)).to(tl.int64)


@triton.jit
def row_offsets(b, h, s, stride_b, stride_h, stride_s):
    """Element offsets of rows."""
    return b * stride_b + h * stride_h + s * stride_s


@triton.jit
def step(stride_n):
    """The stride as int64.  Triton turns a stride of 1 into a Python integer, which has no dtype."""
    return tl.full([], 1, tl.int64) * stride_n


@triton.jit
def _log(lse, i, lse_offs, mask, N, stride_n):
    """lse of state i; -inf beyond the last state."""
    return tl.load(lse + i * step(stride_n) + lse_offs, mask=mask & (i < N), other=float("-inf"))


@triton.jit
def _block(
    o, lse, first, logs, states, o_offs, lse_offs, mask, row_ok, N, stride_n, stride_lse_n, STATES: tl.constexpr
):
    """(lse, o) tuples of STATES states from `first` on; the first members may be loaded already.  All loads are issued
    before the first one is waited for.
    """
    for j in tl.static_range(len(logs), STATES):
        logs += (_log(lse, first + j, lse_offs, row_ok, N, stride_lse_n),)
        states += (tl.load(o + (first + j) * step(stride_n) + o_offs, mask=mask & (first + j < N), other=0.0),)
    return logs, states


@triton.jit
def _first(
    o, lse, b, h, s, columns, mask, row_ok, N, stride_n, stride_lse_n,
    stride_b, stride_h, stride_s, stride_lse_b, stride_lse_h, stride_lse_s, STATES: tl.constexpr,
):  # fmt: skip
    """(offsets of the rows of o, offsets of lse, lse, o) of the first states of a stack."""
    o_offs = row_offsets(b, h, s, stride_b, stride_h, stride_s)[:, None] + columns
    lse_offs = row_offsets(b, h, s, stride_lse_b, stride_lse_h, stride_lse_s)
    log, state = tl.load(lse + lse_offs, mask=row_ok, other=0.0), tl.load(o + o_offs, mask=mask, other=0.0)
    logs, states = _block(
        o, lse, 0, (log,), (state,), o_offs, lse_offs, mask, row_ok, N, stride_n, stride_lse_n, STATES
    )  # fmt: skip
    return o_offs, lse_offs, logs, states


@triton.jit
def _max_of_stack(m_i, logs, lse, lse_offs, mask, N, stride_n, MORE: tl.constexpr):
    """Maximum of m_i and the lse of a stack's states, per row; `logs` are the first ones, already loaded."""
    for j in tl.static_range(len(logs)):
        m_i = tl.maximum(m_i, logs[j])
    if MORE:
        for i in tl.range(len(logs), N, UNROLL):
            for j in tl.static_range(UNROLL):
                m_i = tl.maximum(m_i, _log(lse, i + j, lse_offs, mask, N, stride_n))
    return m_i


@triton.jit
def _sum_of_stack(l_i, weights, lse, lse_offs, mask, m_i, N, stride_n, MORE: tl.constexpr, FROM: tl.constexpr):
    """l_i plus the unnormalised weights of a stack's states from FROM on; `weights` are the first ones."""
    for j in tl.static_range(FROM, len(weights)):
        l_i += weights[j]
    if MORE:
        for i in tl.range(len(weights), N, UNROLL):
            for j in tl.static_range(UNROLL):
                l_i += exp(_log(lse, i + j, lse_offs, mask, N, stride_n) - m_i, True)
    return l_i


@triton.jit
def _exps(logs, m_i):
    """Unnormalised weights."""
    weights = ()
    for j in tl.static_range(len(logs)):
        weights += (exp(logs[j] - m_i, True),)
    return weights


@triton.jit
def _denominator(
    logs, other_logs, lse, other_lse, lse_offs, other_lse_offs, row_ok, N, N_OTHER, stride_n, stride_other_n,
    MORE: tl.constexpr,
):  # fmt: skip  # logs, other_logs: lse of the first states, (ROWS,) each
    """(m_i, l_i): maximum of the lse, sum of exp(lse - m_i) of each row; (0, 0) where no state saw a key."""
    m_i = tl.full(logs[0].shape, float("-inf"), tl.float32)
    m_i = _max_of_stack(m_i, logs, lse, lse_offs, row_ok, N, stride_n, MORE)
    if other_lse is not None:
        m_i = _max_of_stack(m_i, other_logs, other_lse, other_lse_offs, row_ok, N_OTHER, stride_other_n, MORE)
    m_i = tl.where(m_i == float("-inf"), 0.0, m_i)  # -inf - -inf would be NaN
    weights = _exps(logs, m_i)
    l_i = _sum_of_stack(weights[0], weights, lse, lse_offs, row_ok, m_i, N, stride_n, MORE, 1)
    if other_lse is not None:
        weights = _exps(other_logs, m_i)
        l_i = _sum_of_stack(l_i, weights, other_lse, other_lse_offs, row_ok, m_i, N_OTHER, stride_other_n, MORE, 0)
    return m_i, l_i


@triton.jit
def _weight(log, m_i, denom):
    return exp(log - m_i, True) / denom


@triton.jit
def _by_row(x, BLOCK_D: tl.constexpr):
    """x (ROWS,) in the layout of a tile's rows.  Otherwise each state's weight goes through shared memory: the result
    of a loop over lse stays in the layout of its loads.
    """
    return tl.max(tl.broadcast_to(x[:, None], x.shape[0], BLOCK_D), 1)


@triton.jit
def _add(acc, logs, states, m_i, denom):
    """acc (ROWS, BLOCK_D) plus weighted o, in order.  tl.where, because a state that saw no key may hold NaN."""
    for j in tl.static_range(len(logs)):
        weighted = states[j].to(tl.float32) * _weight(logs[j], m_i, denom)[:, None]
        acc += tl.where((logs[j] == float("-inf"))[:, None], 0.0, weighted)
    return acc


@triton.jit
def _add_stack(
    acc, logs, states, o, lse, o_offs, lse_offs, mask, row_ok, m_i, denom, N, stride_n, stride_lse_n, MORE: tl.constexpr
):  # fmt: skip
    """acc plus the weighted o of N states; `logs` and `states` are the first ones."""
    acc = _add(acc, logs, states, m_i, denom)
    if MORE:
        for i in tl.range(len(logs), N, 2):  # four spill in unaligned rows (gfx942) and in float32 (sm_80)
            next_logs, next_states = _block(
                o, lse, i, (), (), o_offs, lse_offs, mask, row_ok, N, stride_n, stride_lse_n, 2
            )  # fmt: skip
            acc = _add(acc, next_logs, next_states, m_i, denom)
    return acc


@triton.jit(do_not_specialize_on_alignment=ANY_ALIGNMENT)
def merge_kernel(
    out, out_lse, o, lse, other, other_lse, M, H, S, D, N, N_OTHER,  # o, other: (N, B, H, S, D)   lse: (N, B, H, S)
    begin_other, begin_other_lse,  # elements before the first state of the second stack
    stride_n, stride_other_n, stride_lse_n, stride_other_lse_n,
    stride_out_b, stride_out_h, stride_out_s,
    stride_b, stride_h, stride_s, stride_other_b, stride_other_h, stride_other_s,
    stride_lse_b, stride_lse_h, stride_lse_s, stride_other_lse_b, stride_other_lse_h, stride_other_lse_s,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, STATES: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """out: (B, H, S, D)   out_lse: (B, H, S) contiguous   M = B * H * S
    STATES: number of states loaded first, together   MORE: there are more
    """
    row = rows(M, ROWS)
    b, h, s = indices(row, H, S)
    columns = tl.arange(0, BLOCK_D)[None, :]
    row_ok = row < M
    mask = row_ok[:, None] & (columns < D)

    # Load the first states of each stack
    o_offs, lse_offs, logs, states = _first(
        o, lse, b, h, s, columns, mask, row_ok, N, stride_n, stride_lse_n,
        stride_b, stride_h, stride_s, stride_lse_b, stride_lse_h, stride_lse_s, STATES,
    )  # fmt: skip
    other_offs, other_lse_offs, other_logs, other_states = o_offs, lse_offs, logs, states
    if other is not None:
        other += begin_other
        other_lse += begin_other_lse
        other_offs, other_lse_offs, other_logs, other_states = _first(
            other, other_lse, b, h, s, columns, mask, row_ok, N_OTHER, stride_other_n, stride_other_lse_n,
            stride_other_b, stride_other_h, stride_other_s,
            stride_other_lse_b, stride_other_lse_h, stride_other_lse_s, STATES,
        )  # fmt: skip

    # Weights and the merged lse
    m_i, l_i = _denominator(
        logs, other_logs, lse, other_lse, lse_offs, other_lse_offs, row_ok, N, N_OTHER, stride_lse_n,
        stride_other_lse_n, MORE,
    )  # fmt: skip
    denom = tl.where(l_i == 0.0, 1.0, l_i)
    merged = tl.where(l_i == 0.0, float("-inf"), m_i + tl.log(denom))
    if MORE:
        m_i, denom = _by_row(m_i, BLOCK_D), _by_row(denom, BLOCK_D)

    # o' = sum of weighted o
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    acc = _add_stack(
        acc, logs, states, o, lse, o_offs, lse_offs, mask, row_ok, m_i, denom, N, stride_n, stride_lse_n, MORE
    )
    if other is not None:
        acc = _add_stack(
            acc, other_logs, other_states, other, other_lse, other_offs, other_lse_offs, mask, row_ok, m_i, denom,
            N_OTHER, stride_other_n, stride_other_lse_n, MORE,
        )  # fmt: skip

    # Store
    out_offs = row_offsets(b, h, s, stride_out_b, stride_out_h, stride_out_s)[:, None] + columns
    tl.store(out + out_offs, acc.to(out.dtype.element_ty), mask=mask)
    tl.store(out_lse + row, merged, mask=row_ok)


@triton.jit
def _products(grad, states):
    """do . o_i per row."""
    products = ()
    for j in tl.static_range(len(states)):
        products += (tl.sum(grad * states[j].to(tl.float32), 1),)
    return products


@triton.jit
def _add_weighted(l_i, products, logs, m_i, denom):
    for j in tl.static_range(len(logs)):
        l_i += tl.where(logs[j] == float("-inf"), 0.0, products[j] * _weight(logs[j], m_i, denom))
    return l_i


@triton.jit
def _weighted_products(
    l_i, products, logs, grad, o, lse, o_offs, lse_offs, mask, row_ok, m_i, denom, N, stride_n, stride_lse_n,
    MORE: tl.constexpr,
):  # fmt: skip
    """total (ROWS,) and the weighted products do . o_i of N states; `products` and `logs` are the first ones."""
    l_i = _add_weighted(l_i, products, logs, m_i, denom)
    if MORE:
        for i in tl.range(len(logs), N, 2):
            next_logs, next_states = _block(
                o, lse, i, (), (), o_offs, lse_offs, mask, row_ok, N, stride_n, stride_lse_n, 2
            )  # fmt: skip
            for j in tl.static_range(2):
                l_i = _add_weighted(l_i, _products(grad, (next_states[j],)), (next_logs[j],), m_i, denom)
    return l_i


@triton.jit
def _write(
    d_o, d_lse, first, do_offs, stride_dn, stride_dlse_n, products, logs, shift, grad, row, mask, row_ok, m_i, denom, N
):  # fmt: skip
    """Gradients of the states from `first` on.  products: (ROWS,) each, do . o_i   shift: (ROWS,), dlse minus the
    sum of all weighted products
    """
    for j in tl.static_range(len(logs)):
        i = first + j
        empty, weight = logs[j] == float("-inf"), _weight(logs[j], m_i, denom)
        d_log = tl.where(empty, 0.0, weight * (products[j] + shift))
        d_state = tl.where(empty[:, None], 0.0, weight[:, None] * grad)
        tl.store(d_o + i * step(stride_dn) + do_offs, d_state.to(d_o.dtype.element_ty), mask=mask & (i < N))
        tl.store(d_lse + i * step(stride_dlse_n) + row, d_log, mask=row_ok & (i < N))


@triton.jit
def _gradients(
    d_o, d_lse, do_offs, stride_dn, stride_dlse_n, products, logs, shift, grad, o, lse, o_offs, lse_offs, row, mask,
    row_ok, m_i, denom, N, stride_n, stride_lse_n, MORE: tl.constexpr,
):  # fmt: skip  # d_lse: (N, M) contiguous   products, logs: of the first states
    _write(
        d_o, d_lse, 0, do_offs, stride_dn, stride_dlse_n, products, logs, shift, grad, row, mask, row_ok, m_i, denom, N
    )  # fmt: skip
    if MORE:
        for i in tl.range(len(logs), N):
            next_logs, states = _block(
                o, lse, i, (), (), o_offs, lse_offs, mask, row_ok, N, stride_n, stride_lse_n, 1
            )  # fmt: skip
            _write(
                d_o, d_lse, i, do_offs, stride_dn, stride_dlse_n, _products(grad, states), next_logs, shift, grad, row,
                mask, row_ok, m_i, denom, N,
            )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=ANY_ALIGNMENT)
def merge_backward_kernel(
    d_o, d_lse, d_other, d_other_lse, do, dlse, o, lse, other, other_lse, begin_dother_lse, M, H, S, D, N, N_OTHER,
    begin_other, begin_other_lse, begin_dother,
    stride_n, stride_other_n, stride_lse_n, stride_other_lse_n, stride_dn, stride_dother_n,
    stride_do_b, stride_do_h, stride_do_s,
    stride_b, stride_h, stride_s, stride_other_b, stride_other_h, stride_other_s,
    stride_lse_b, stride_lse_h, stride_lse_s, stride_other_lse_b, stride_other_lse_h, stride_other_lse_s,
    stride_db, stride_dh, stride_ds, stride_dother_b, stride_dother_h, stride_dother_s,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, STATES: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """Gradients d_* of both stacks, shapes as in merge_kernel; do: (B, H, S, D), dlse: (B, H, S) contiguous."""
    row = rows(M, ROWS)
    b, h, s = indices(row, H, S)
    columns = tl.arange(0, BLOCK_D)[None, :]
    row_ok = row < M
    mask = row_ok[:, None] & (columns < D)

    # Load do and the first states of each stack
    do_offs = row_offsets(b, h, s, stride_do_b, stride_do_h, stride_do_s)[:, None] + columns
    grad = tl.load(do + do_offs, mask=mask, other=0.0)
    o_offs, lse_offs, logs, states = _first(
        o, lse, b, h, s, columns, mask, row_ok, N, stride_n, stride_lse_n,
        stride_b, stride_h, stride_s, stride_lse_b, stride_lse_h, stride_lse_s, STATES,
    )  # fmt: skip
    other_offs, other_lse_offs, other_logs, other_states = o_offs, lse_offs, logs, states
    if other is not None:
        other += begin_other
        other_lse += begin_other_lse
        other_offs, other_lse_offs, other_logs, other_states = _first(
            other, other_lse, b, h, s, columns, mask, row_ok, N_OTHER, stride_other_n, stride_other_lse_n,
            stride_other_b, stride_other_h, stride_other_s,
            stride_other_lse_b, stride_other_lse_h, stride_other_lse_s, STATES,
        )  # fmt: skip
    shift = tl.zeros((ROWS,), tl.float32)
    if dlse is not None:
        shift += tl.load(dlse + row, mask=row_ok, other=0.0)

    # Weights
    m_i, l_i = _denominator(
        logs, other_logs, lse, other_lse, lse_offs, other_lse_offs, row_ok, N, N_OTHER, stride_lse_n,
        stride_other_lse_n, MORE,
    )  # fmt: skip
    denom = tl.where(l_i == 0.0, 1.0, l_i)
    if MORE:
        m_i, denom = _by_row(m_i, BLOCK_D), _by_row(denom, BLOCK_D)

    # sum_j w_j do . o_j
    grad = grad.to(tl.float32)
    products = _products(grad, states)
    dot_sum = tl.zeros((ROWS,), tl.float32)
    dot_sum = _weighted_products(
        dot_sum, products, logs, grad, o, lse, o_offs, lse_offs, mask, row_ok, m_i, denom, N, stride_n, stride_lse_n,
        MORE,
    )  # fmt: skip
    other_products = products
    if other is not None:
        other_products = _products(grad, other_states)
        dot_sum = _weighted_products(
            dot_sum, other_products, other_logs, grad, other, other_lse, other_offs, other_lse_offs, mask, row_ok, m_i,
            denom, N_OTHER, stride_other_n, stride_other_lse_n, MORE,
        )  # fmt: skip
    shift -= dot_sum

    # Gradients of each stack
    grad_offs = row_offsets(b, h, s, stride_db, stride_dh, stride_ds)[:, None] + columns
    _gradients(
        d_o, d_lse, grad_offs, stride_dn, M, products, logs, shift, grad, o, lse, o_offs, lse_offs, row, mask, row_ok,
        m_i, denom, N, stride_n, stride_lse_n, MORE,
    )  # fmt: skip
    if other is not None:
        grad_offs = row_offsets(b, h, s, stride_dother_b, stride_dother_h, stride_dother_s)[:, None] + columns
        _gradients(
            d_other + begin_dother, d_other_lse + begin_dother_lse, grad_offs, stride_dother_n, M, other_products,
            other_logs, shift, grad, other, other_lse, other_offs, other_lse_offs, row, mask, row_ok, m_i, denom,
            N_OTHER, stride_other_n, stride_other_lse_n, MORE,
        )  # fmt: skip
