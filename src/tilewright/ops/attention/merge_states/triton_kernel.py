"""The kernels that join states of attention, there and back; the idea is told in `triton.py`."""

# mypy: ignore-errors

import triton
import triton.language as tl

from tilewright.ops.exponential import exp

UNROLL = tl.constexpr(4)  # logarithms whose reads are on the way together: they do not depend on each other

# Counts, and places of logarithms, which are read one by one: a kernel for multiples of 16 would be the same kernel
ANY_ALIGNMENT = (
    *("M", "H", "S", "N", "N_OTHER", "begin_other_lse", "begin_dother_lse"),
    *(f"stride_{name}_{of}" for name in ("lse", "other_lse") for of in "nbhs"),
)


@triton.jit
def rows(M, ROWS: tl.constexpr):
    """Indices of this program's rows, in 64 bits only where M needs them: a division costs three of 32 bits."""
    if (tl.full([], 1, tl.int32) * M).dtype == tl.int64:
        at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    else:
        at = tl.program_id(0).to(tl.uint32) * ROWS + tl.arange(0, ROWS).to(tl.uint32)
    return at


@triton.jit
def indices(at, H, S):
    """(b, h, s) of rows `at` of (B, H, S).  Sizes of 1 are constants, by which nothing is divided."""
    one = tl.full([], 1, at.dtype)
    over = at // (one * S)
    return (over // (one * H)).to(tl.int64), (over % (one * H)).to(tl.int64), (at % (one * S)).to(tl.int64)


@triton.jit
def places(b, h, s, stride_b, stride_h, stride_s):
    """Where rows begin."""
    return b * stride_b + h * stride_h + s * stride_s


@triton.jit
def step(stride_n):
    """In 64 bits.  Triton makes a Python integer of a stride of 1, which has no dtype."""
    return tl.full([], 1, tl.int64) * stride_n


@triton.jit
def _log(lse, i, at_lse, mask, N, stride_n):
    """A state beyond the last is one that saw no key."""
    return tl.load(lse + i * step(stride_n) + at_lse, mask=mask & (i < N), other=float("-inf"))


@triton.jit
def _block(o, lse, first, logs, states, at_o, at_lse, mask, inside, N, stride_n, stride_lse_n, STATES: tl.constexpr):
    """(lse, o) of STATES states from `first` on, tuples of which the first members may be given.  All reads are on the
    way before anything waits for one.
    """
    for j in tl.static_range(len(logs), STATES):
        logs += (_log(lse, first + j, at_lse, inside, N, stride_lse_n),)
        states += (tl.load(o + (first + j) * step(stride_n) + at_o, mask=mask & (first + j < N), other=0.0),)
    return logs, states


@triton.jit
def _first(
    o, lse, b, h, s, columns, mask, inside, N, stride_n, stride_lse_n,
    stride_b, stride_h, stride_s, stride_lse_b, stride_lse_h, stride_lse_s, STATES: tl.constexpr,
):  # fmt: skip
    """Of the first states of a stack: where the rows of o and of lse are, lse, o."""
    at_o = places(b, h, s, stride_b, stride_h, stride_s)[:, None] + columns
    at_lse = places(b, h, s, stride_lse_b, stride_lse_h, stride_lse_s)
    log, state = tl.load(lse + at_lse, mask=inside, other=0.0), tl.load(o + at_o, mask=mask, other=0.0)
    logs, states = _block(
        o, lse, 0, (log,), (state,), at_o, at_lse, mask, inside, N, stride_n, stride_lse_n, STATES
    )  # fmt: skip
    return at_o, at_lse, logs, states


@triton.jit
def _top(top, logs, lse, at_lse, mask, N, stride_n, MORE: tl.constexpr):
    """The larger of `top` and the logarithms of a stack's states, of which the first are here, for each row."""
    for j in tl.static_range(len(logs)):
        top = tl.maximum(top, logs[j])
    if MORE:
        for i in tl.range(len(logs), N, UNROLL):
            for j in tl.static_range(UNROLL):
                top = tl.maximum(top, _log(lse, i + j, at_lse, mask, N, stride_n))
    return top


@triton.jit
def _total(total, weights, lse, at_lse, mask, top, N, stride_n, MORE: tl.constexpr, FROM: tl.constexpr):
    """`total` and the weights of a stack's states from FROM on, of which the first are here, not yet divided."""
    for j in tl.static_range(FROM, len(weights)):
        total += weights[j]
    if MORE:
        for i in tl.range(len(weights), N, UNROLL):
            for j in tl.static_range(UNROLL):
                total += exp(_log(lse, i + j, at_lse, mask, N, stride_n) - top, True)
    return total


@triton.jit
def _exps(logs, top):
    """Weights, not yet divided."""
    weights = ()
    for j in tl.static_range(len(logs)):
        weights += (exp(logs[j] - top, True),)
    return weights


@triton.jit
def _denominator(
    logs, other_logs, lse, other_lse, at_lse, at_other_lse, inside, N, N_OTHER, stride_n, stride_other_n,
    MORE: tl.constexpr,
):  # fmt: skip  # logs, other_logs: of the first states, (ROWS,) each
    """(maximum of the logarithms, sum of exp(lse_i - maximum)) of each row; 0 and 0 where no state saw a key."""
    top = tl.full(logs[0].shape, float("-inf"), tl.float32)
    top = _top(top, logs, lse, at_lse, inside, N, stride_n, MORE)
    if other_lse is not None:
        top = _top(top, other_logs, other_lse, at_other_lse, inside, N_OTHER, stride_other_n, MORE)
    top = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    weights = _exps(logs, top)
    total = _total(weights[0], weights, lse, at_lse, inside, top, N, stride_n, MORE, 1)
    if other_lse is not None:
        weights = _exps(other_logs, top)
        total = _total(total, weights, other_lse, at_other_lse, inside, top, N_OTHER, stride_other_n, MORE, 0)
    return top, total


@triton.jit
def _weight(log, top, divisor):
    return exp(log - top, True) / divisor


@triton.jit
def _by_row(x, BLOCK_D: tl.constexpr):
    """x (ROWS,), where the threads are that hold its row of a tile.  Each state's weight would go through shared memory
    otherwise: the compiler leaves what a loop over logarithms gave where it read them.
    """
    return tl.max(tl.broadcast_to(x[:, None], x.shape[0], BLOCK_D), 1)


@triton.jit
def _add(acc, logs, states, top, divisor):
    """acc (ROWS, BLOCK_D) and weighted o, in order.  By selection: what a state that saw no key holds may be NaN."""
    for j in tl.static_range(len(logs)):
        weighted = states[j].to(tl.float32) * _weight(logs[j], top, divisor)[:, None]
        acc += tl.where((logs[j] == float("-inf"))[:, None], 0.0, weighted)
    return acc


@triton.jit
def _add_stack(
    acc, logs, states, o, lse, at_o, at_lse, mask, inside, top, divisor, N, stride_n, stride_lse_n, MORE: tl.constexpr
):  # fmt: skip
    """acc and the weighted o of N states, of which the first are here."""
    acc = _add(acc, logs, states, top, divisor)
    if MORE:
        for i in tl.range(len(logs), N, 2):  # four spill in unaligned rows (gfx942) and in float32 (sm_80)
            next_logs, next_states = _block(
                o, lse, i, (), (), at_o, at_lse, mask, inside, N, stride_n, stride_lse_n, 2
            )  # fmt: skip
            acc = _add(acc, next_logs, next_states, top, divisor)
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
    STATES: how many are read first, together   MORE: whether there are more
    """
    at = rows(M, ROWS)
    b, h, s = indices(at, H, S)
    columns = tl.arange(0, BLOCK_D)[None, :]
    inside = at < M
    mask = inside[:, None] & (columns < D)
    at_o, at_lse, logs, states = _first(
        o, lse, b, h, s, columns, mask, inside, N, stride_n, stride_lse_n,
        stride_b, stride_h, stride_s, stride_lse_b, stride_lse_h, stride_lse_s, STATES,
    )  # fmt: skip
    at_other, at_other_lse, other_logs, other_states = at_o, at_lse, logs, states
    if other is not None:
        other += begin_other
        other_lse += begin_other_lse
        at_other, at_other_lse, other_logs, other_states = _first(
            other, other_lse, b, h, s, columns, mask, inside, N_OTHER, stride_other_n, stride_other_lse_n,
            stride_other_b, stride_other_h, stride_other_s,
            stride_other_lse_b, stride_other_lse_h, stride_other_lse_s, STATES,
        )  # fmt: skip

    top, total = _denominator(
        logs, other_logs, lse, other_lse, at_lse, at_other_lse, inside, N, N_OTHER, stride_lse_n, stride_other_lse_n,
        MORE,
    )  # fmt: skip
    divisor = tl.where(total == 0.0, 1.0, total)
    merged = tl.where(total == 0.0, float("-inf"), top + tl.log(divisor))
    if MORE:
        top, divisor = _by_row(top, BLOCK_D), _by_row(divisor, BLOCK_D)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    acc = _add_stack(
        acc, logs, states, o, lse, at_o, at_lse, mask, inside, top, divisor, N, stride_n, stride_lse_n, MORE
    )
    if other is not None:
        acc = _add_stack(
            acc, other_logs, other_states, other, other_lse, at_other, at_other_lse, mask, inside, top, divisor,
            N_OTHER, stride_other_n, stride_other_lse_n, MORE,
        )  # fmt: skip
    at_out = places(b, h, s, stride_out_b, stride_out_h, stride_out_s)[:, None] + columns
    tl.store(out + at_out, acc.to(out.dtype.element_ty), mask=mask)
    tl.store(out_lse + at, merged, mask=inside)


@triton.jit
def _products(grad, states):
    """do . o_i of each row."""
    products = ()
    for j in tl.static_range(len(states)):
        products += (tl.sum(grad * states[j].to(tl.float32), 1),)
    return products


@triton.jit
def _add_along(total, products, logs, top, divisor):
    for j in tl.static_range(len(logs)):
        total += tl.where(logs[j] == float("-inf"), 0.0, products[j] * _weight(logs[j], top, divisor))
    return total


@triton.jit
def _along(
    total, products, logs, grad, o, lse, at_o, at_lse, mask, inside, top, divisor, N, stride_n, stride_lse_n,
    MORE: tl.constexpr,
):  # fmt: skip
    """total (ROWS,) and the weighted products do . o_i of N states, of which the first are here."""
    total = _add_along(total, products, logs, top, divisor)
    if MORE:
        for i in tl.range(len(logs), N, 2):
            next_logs, next_states = _block(
                o, lse, i, (), (), at_o, at_lse, mask, inside, N, stride_n, stride_lse_n, 2
            )  # fmt: skip
            for j in tl.static_range(2):
                total = _add_along(total, _products(grad, (next_states[j],)), (next_logs[j],), top, divisor)
    return total


@triton.jit
def _write(
    d_o, d_lse, first, at_do, stride_dn, stride_dlse_n, products, logs, shift, grad, at, mask, inside, top, divisor, N
):  # fmt: skip
    """Gradients of the states from `first` on.  products: (ROWS,) each, do . o_i   shift: (ROWS,), dlse' less the sum
    of all weighted products
    """
    for j in tl.static_range(len(logs)):
        i = first + j
        blind, weight = logs[j] == float("-inf"), _weight(logs[j], top, divisor)
        d_log = tl.where(blind, 0.0, weight * (products[j] + shift))
        d_state = tl.where(blind[:, None], 0.0, weight[:, None] * grad)
        tl.store(d_o + i * step(stride_dn) + at_do, d_state.to(d_o.dtype.element_ty), mask=mask & (i < N))
        tl.store(d_lse + i * step(stride_dlse_n) + at, d_log, mask=inside & (i < N))


@triton.jit
def _gradients(
    d_o, d_lse, at_do, stride_dn, stride_dlse_n, products, logs, shift, grad, o, lse, at_o, at_lse, at, mask, inside,
    top, divisor, N, stride_n, stride_lse_n, MORE: tl.constexpr,
):  # fmt: skip  # d_lse: (N, M) contiguous   products, logs: of the first states
    _write(
        d_o, d_lse, 0, at_do, stride_dn, stride_dlse_n, products, logs, shift, grad, at, mask, inside, top, divisor, N
    )  # fmt: skip
    if MORE:
        for i in tl.range(len(logs), N):
            next_logs, states = _block(
                o, lse, i, (), (), at_o, at_lse, mask, inside, N, stride_n, stride_lse_n, 1
            )  # fmt: skip
            _write(
                d_o, d_lse, i, at_do, stride_dn, stride_dlse_n, _products(grad, states), next_logs, shift, grad, at,
                mask, inside, top, divisor, N,
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
    """Shapes as above; d_* as what they are gradients of, do: (B, H, S, D), dlse: (B, H, S) contiguous."""
    at = rows(M, ROWS)
    b, h, s = indices(at, H, S)
    columns = tl.arange(0, BLOCK_D)[None, :]
    inside = at < M
    mask = inside[:, None] & (columns < D)
    at_do = places(b, h, s, stride_do_b, stride_do_h, stride_do_s)[:, None] + columns
    grad = tl.load(do + at_do, mask=mask, other=0.0)
    at_o, at_lse, logs, states = _first(
        o, lse, b, h, s, columns, mask, inside, N, stride_n, stride_lse_n,
        stride_b, stride_h, stride_s, stride_lse_b, stride_lse_h, stride_lse_s, STATES,
    )  # fmt: skip
    at_other, at_other_lse, other_logs, other_states = at_o, at_lse, logs, states
    if other is not None:
        other += begin_other
        other_lse += begin_other_lse
        at_other, at_other_lse, other_logs, other_states = _first(
            other, other_lse, b, h, s, columns, mask, inside, N_OTHER, stride_other_n, stride_other_lse_n,
            stride_other_b, stride_other_h, stride_other_s,
            stride_other_lse_b, stride_other_lse_h, stride_other_lse_s, STATES,
        )  # fmt: skip
    shift = tl.zeros((ROWS,), tl.float32)
    if dlse is not None:
        shift += tl.load(dlse + at, mask=inside, other=0.0)

    top, total = _denominator(
        logs, other_logs, lse, other_lse, at_lse, at_other_lse, inside, N, N_OTHER, stride_lse_n, stride_other_lse_n,
        MORE,
    )  # fmt: skip
    divisor = tl.where(total == 0.0, 1.0, total)
    if MORE:
        top, divisor = _by_row(top, BLOCK_D), _by_row(divisor, BLOCK_D)
    grad = grad.to(tl.float32)
    products = _products(grad, states)
    along = tl.zeros((ROWS,), tl.float32)
    along = _along(
        along, products, logs, grad, o, lse, at_o, at_lse, mask, inside, top, divisor, N, stride_n, stride_lse_n, MORE
    )  # fmt: skip
    other_products = products
    if other is not None:
        other_products = _products(grad, other_states)
        along = _along(
            along, other_products, other_logs, grad, other, other_lse, at_other, at_other_lse, mask, inside, top,
            divisor, N_OTHER, stride_other_n, stride_other_lse_n, MORE,
        )  # fmt: skip
    shift -= along

    at_made = places(b, h, s, stride_db, stride_dh, stride_ds)[:, None] + columns
    _gradients(
        d_o, d_lse, at_made, stride_dn, M, products, logs, shift, grad, o, lse, at_o, at_lse, at, mask, inside, top,
        divisor, N, stride_n, stride_lse_n, MORE,
    )  # fmt: skip
    if other is not None:
        at_made = places(b, h, s, stride_dother_b, stride_dother_h, stride_dother_s)[:, None] + columns
        _gradients(
            d_other + begin_dother, d_other_lse + begin_dother_lse, at_made, stride_dother_n, M, other_products,
            other_logs, shift, grad, other, other_lse, at_other, at_other_lse, at, mask, inside, top, divisor, N_OTHER,
            stride_other_n, stride_other_lse_n, MORE,
        )  # fmt: skip
