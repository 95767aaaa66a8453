"""The kernels that join states of attention, there and back; the idea is told in `triton.py`."""

# mypy: ignore-errors

import triton
import triton.language as tl

from tilewright.ops.exponential import exp

UNROLL = tl.constexpr(4)  # logarithms whose reads are on the way together: they do not depend on each other

# Counts, and places of logarithms, which are read one by one: a kernel for multiples of 16 would be the same kernel
_ANY = (
    *("M", "H", "S", "N", "N_OTHER", "begin_other_lse", "begin_dother_lse"),
    *(f"stride_{name}_{of}" for name in ("lse", "other_lse") for of in "nbhs"),
)


@triton.jit
def _rows(M, ROWS: tl.constexpr):
    """Indices of this program's rows, in 64 bits only where M needs them: a division costs three of 32 bits."""
    if (tl.full([], 1, tl.int32) * M).dtype == tl.int64:
        at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    else:
        at = tl.program_id(0).to(tl.uint32) * ROWS + tl.arange(0, ROWS).to(tl.uint32)
    return at


@triton.jit
def _indices(at, H, S):
    """(b, h, s) of rows `at` of (B, H, S).  Sizes of 1 are constants, by which nothing is divided."""
    one = tl.full([], 1, at.dtype)
    over = at // (one * S)
    return (over // (one * H)).to(tl.int64), (over % (one * H)).to(tl.int64), (at % (one * S)).to(tl.int64)


@triton.jit
def _places(b, h, s, stride_b, stride_h, stride_s):
    """Where rows begin."""
    return b * stride_b + h * stride_h + s * stride_s


@triton.jit
def _step(stride_n):
    return tl.full([], 1, tl.int64) * stride_n  # Triton makes a Python integer of a stride of 1, which has no dtype


@triton.jit
def _log(lse, i, places, mask, N, stride_n):
    """A state beyond the last is one that saw no key."""
    return tl.load(lse + i * _step(stride_n) + places, mask=mask & (i < N), other=float("-inf"))


@triton.jit
def _state(o, lse, i, at_o, at_lse, mask, inside, N, stride_n, stride_lse_n):
    """(lse, o) of state i."""
    log = _log(lse, i, at_lse, inside, N, stride_lse_n)
    return log, tl.load(o + i * _step(stride_n) + at_o, mask=mask & (i < N), other=0.0)


@triton.jit
def _first(
    o, lse, b, h, s, columns, mask, inside, stride_b, stride_h, stride_s, stride_lse_b, stride_lse_h, stride_lse_s
):  # fmt: skip
    """Of the first state of a stack: where the rows of o and of lse are, lse, o."""
    at_o = _places(b, h, s, stride_b, stride_h, stride_s)[:, None] + columns
    at_lse = _places(b, h, s, stride_lse_b, stride_lse_h, stride_lse_s)
    return at_o, at_lse, tl.load(lse + at_lse, mask=inside, other=0.0), tl.load(o + at_o, mask=mask, other=0.0)


@triton.jit
def _top(top, lse, places, mask, N, stride_n):
    """The larger of `top` and the logarithms of all states but the first, for each row."""
    for i in tl.range(1, N, UNROLL):
        for j in tl.static_range(UNROLL):
            top = tl.maximum(top, _log(lse, i + j, places, mask, N, stride_n))
    return top


@triton.jit
def _total(total, lse, places, mask, top, N, stride_n):
    """`total` and the weights of all states but the first, not yet divided."""
    for i in tl.range(1, N, UNROLL):
        for j in tl.static_range(UNROLL):
            total += exp(_log(lse, i + j, places, mask, N, stride_n) - top, True)
    return total


@triton.jit
def _denominator(
    log, other_log, lse, other_lse, at_lse, at_other_lse, inside, N, N_OTHER, stride_n, stride_other_n
):  # fmt: skip  # log, other_log: (ROWS,), of the first states
    """(maximum of the logarithms, sum of exp(lse_i - maximum)) of each row; 0 and 0 where no state saw a key."""
    top = tl.maximum(tl.full(log.shape, float("-inf"), tl.float32), log)
    top = _top(top, lse, at_lse, inside, N, stride_n)
    if other_lse is not None:
        top = _top(tl.maximum(top, other_log), other_lse, at_other_lse, inside, N_OTHER, stride_other_n)
    top = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    total = _total(exp(log - top, True), lse, at_lse, inside, top, N, stride_n)
    if other_lse is not None:
        total += exp(other_log - top, True)
        total = _total(total, other_lse, at_other_lse, inside, top, N_OTHER, stride_other_n)
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
def _add_state(acc, state, log, top, divisor):
    """By selection: what a state that saw no key holds may be NaN."""
    weighted = state.to(tl.float32) * _weight(log, top, divisor)[:, None]
    return acc + tl.where((log == float("-inf"))[:, None], 0.0, weighted)


@triton.jit
def _add(acc, state, log, o, lse, at_o, at_lse, mask, inside, top, divisor, N, stride_n, stride_lse_n):
    """acc (ROWS, BLOCK_D) and the weighted o of N states, of which the first is here."""
    acc = _add_state(acc, state, log, top, divisor)
    for i in tl.range(1, N, 2):  # four spill in unaligned rows (gfx942) and in float32 (sm_80)
        log, state = _state(o, lse, i, at_o, at_lse, mask, inside, N, stride_n, stride_lse_n)
        next_log, next_state = _state(o, lse, i + 1, at_o, at_lse, mask, inside, N, stride_n, stride_lse_n)
        acc = _add_state(acc, state, log, top, divisor)
        acc = _add_state(acc, next_state, next_log, top, divisor)
    return acc


@triton.jit(do_not_specialize_on_alignment=_ANY)
def merge_kernel(
    out, out_lse, o, lse, other, other_lse, M, H, S, D, N, N_OTHER,  # o, other: (N, B, H, S, D)   lse: (N, B, H, S)
    begin_other, begin_other_lse,  # elements before the first state of the second stack
    stride_n, stride_other_n, stride_lse_n, stride_other_lse_n,
    stride_out_b, stride_out_h, stride_out_s,
    stride_b, stride_h, stride_s, stride_other_b, stride_other_h, stride_other_s,
    stride_lse_b, stride_lse_h, stride_lse_s, stride_other_lse_b, stride_other_lse_h, stride_other_lse_s,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out: (B, H, S, D)   out_lse: (B, H, S) contiguous   M = B * H * S"""
    at = _rows(M, ROWS)
    b, h, s = _indices(at, H, S)
    columns = tl.arange(0, BLOCK_D)[None, :]
    inside = at < M
    mask = inside[:, None] & (columns < D)
    at_o, at_lse, log, state = _first(
        o, lse, b, h, s, columns, mask, inside, stride_b, stride_h, stride_s, stride_lse_b, stride_lse_h, stride_lse_s
    )
    at_other, at_other_lse, other_state, other_log = at_o, at_lse, state, log
    if other is not None:
        other += begin_other
        other_lse += begin_other_lse
        at_other, at_other_lse, other_log, other_state = _first(
            other, other_lse, b, h, s, columns, mask, inside, stride_other_b, stride_other_h, stride_other_s,
            stride_other_lse_b, stride_other_lse_h, stride_other_lse_s,
        )  # fmt: skip

    top, total = _denominator(
        log, other_log, lse, other_lse, at_lse, at_other_lse, inside, N, N_OTHER, stride_lse_n, stride_other_lse_n
    )
    divisor = tl.where(total == 0.0, 1.0, total)
    merged = tl.where(total == 0.0, float("-inf"), top + tl.log(divisor))
    if other is None:
        top, divisor = _by_row(top, BLOCK_D), _by_row(divisor, BLOCK_D)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    acc = _add(acc, state, log, o, lse, at_o, at_lse, mask, inside, top, divisor, N, stride_n, stride_lse_n)
    if other is not None:
        acc = _add(
            acc, other_state, other_log, other, other_lse, at_other, at_other_lse, mask, inside, top, divisor, N_OTHER,
            stride_other_n, stride_other_lse_n,
        )  # fmt: skip
    at_out = _places(b, h, s, stride_out_b, stride_out_h, stride_out_s)[:, None] + columns
    tl.store(out + at_out, acc.to(out.dtype.element_ty), mask=mask)
    tl.store(out_lse + at, merged, mask=inside)


@triton.jit
def _add_along(total, product, log, top, divisor):
    return total + tl.where(log == float("-inf"), 0.0, product * _weight(log, top, divisor))


@triton.jit
def _along(total, product, log, grad, o, lse, at_o, at_lse, mask, inside, top, divisor, N, stride_n, stride_lse_n):
    """total (ROWS,) and the weighted products do . o_i of N states, of which the first is here."""
    total = _add_along(total, product, log, top, divisor)
    for i in tl.range(1, N, 2):
        log, state = _state(o, lse, i, at_o, at_lse, mask, inside, N, stride_n, stride_lse_n)
        next_log, next_state = _state(o, lse, i + 1, at_o, at_lse, mask, inside, N, stride_n, stride_lse_n)
        total = _add_along(total, tl.sum(grad * state.to(tl.float32), 1), log, top, divisor)
        total = _add_along(total, tl.sum(grad * next_state.to(tl.float32), 1), next_log, top, divisor)
    return total


@triton.jit
def _gradient(d_o, d_lse, at_do, at, product, log, shift, grad, mask, inside, top, divisor):
    """Of one state.  product: (ROWS,), do . o_i   shift: (ROWS,), dlse' less the sum of all weighted products"""
    blind, weight = log == float("-inf"), _weight(log, top, divisor)
    d_log = tl.where(blind, 0.0, weight * (product + shift))
    d_state = tl.where(blind[:, None], 0.0, weight[:, None] * grad)
    tl.store(d_o + at_do, d_state.to(d_o.dtype.element_ty), mask=mask)
    tl.store(d_lse + at, d_log, mask=inside)


@triton.jit
def _gradients(
    d_o, d_lse, at_do, stride_dn, stride_dlse_n, product, log, shift, grad, o, lse, at_o, at_lse, at, mask, inside,
    top, divisor, N, stride_n, stride_lse_n,
):  # fmt: skip  # d_lse: (N, M) contiguous   product, log: (ROWS,), of the first state
    _gradient(d_o, d_lse, at_do, at, product, log, shift, grad, mask, inside, top, divisor)
    for i in tl.range(1, N):
        log = tl.load(lse + i * _step(stride_lse_n) + at_lse, mask=inside, other=0.0)
        state = tl.load(o + i * _step(stride_n) + at_o, mask=mask, other=0.0).to(tl.float32)
        made, made_log = d_o + i * _step(stride_dn), d_lse + i * _step(stride_dlse_n)
        _gradient(made, made_log, at_do, at, tl.sum(grad * state, 1), log, shift, grad, mask, inside, top, divisor)


@triton.jit(do_not_specialize_on_alignment=_ANY)
def merge_backward_kernel(
    d_o, d_lse, d_other, d_other_lse, do, dlse, o, lse, other, other_lse, begin_dother_lse, M, H, S, D, N, N_OTHER,
    begin_other, begin_other_lse, begin_dother,
    stride_n, stride_other_n, stride_lse_n, stride_other_lse_n, stride_dn, stride_dother_n,
    stride_do_b, stride_do_h, stride_do_s,
    stride_b, stride_h, stride_s, stride_other_b, stride_other_h, stride_other_s,
    stride_lse_b, stride_lse_h, stride_lse_s, stride_other_lse_b, stride_other_lse_h, stride_other_lse_s,
    stride_db, stride_dh, stride_ds, stride_dother_b, stride_dother_h, stride_dother_s,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Shapes as above; d_* as what they are gradients of, do: (B, H, S, D), dlse: (B, H, S) contiguous."""
    at = _rows(M, ROWS)
    b, h, s = _indices(at, H, S)
    columns = tl.arange(0, BLOCK_D)[None, :]
    inside = at < M
    mask = inside[:, None] & (columns < D)
    at_do = _places(b, h, s, stride_do_b, stride_do_h, stride_do_s)[:, None] + columns
    grad = tl.load(do + at_do, mask=mask, other=0.0)
    at_o, at_lse, log, state = _first(
        o, lse, b, h, s, columns, mask, inside, stride_b, stride_h, stride_s, stride_lse_b, stride_lse_h, stride_lse_s
    )
    at_other, at_other_lse, other_state, other_log = at_o, at_lse, state, log
    if other is not None:
        other += begin_other
        other_lse += begin_other_lse
        at_other, at_other_lse, other_log, other_state = _first(
            other, other_lse, b, h, s, columns, mask, inside, stride_other_b, stride_other_h, stride_other_s,
            stride_other_lse_b, stride_other_lse_h, stride_other_lse_s,
        )  # fmt: skip
    shift = tl.zeros((ROWS,), tl.float32)
    if dlse is not None:
        shift += tl.load(dlse + at, mask=inside, other=0.0)

    top, total = _denominator(
        log, other_log, lse, other_lse, at_lse, at_other_lse, inside, N, N_OTHER, stride_lse_n, stride_other_lse_n
    )
    divisor = tl.where(total == 0.0, 1.0, total)
    if other is None:
        top, divisor = _by_row(top, BLOCK_D), _by_row(divisor, BLOCK_D)
    grad = grad.to(tl.float32)
    product, other_product = tl.sum(grad * state.to(tl.float32), 1), tl.zeros((ROWS,), tl.float32)
    along = tl.zeros((ROWS,), tl.float32)
    along = _along(
        along, product, log, grad, o, lse, at_o, at_lse, mask, inside, top, divisor, N, stride_n, stride_lse_n
    )
    if other is not None:
        other_product = tl.sum(grad * other_state.to(tl.float32), 1)
        along = _along(
            along, other_product, other_log, grad, other, other_lse, at_other, at_other_lse, mask, inside, top, divisor,
            N_OTHER, stride_other_n, stride_other_lse_n,
        )  # fmt: skip
    shift -= along

    at_made = _places(b, h, s, stride_db, stride_dh, stride_ds)[:, None] + columns
    _gradients(
        d_o, d_lse, at_made, stride_dn, M, product, log, shift, grad, o, lse, at_o, at_lse, at, mask, inside, top,
        divisor, N, stride_n, stride_lse_n,
    )  # fmt: skip
    if other is not None:
        at_made = _places(b, h, s, stride_dother_b, stride_dother_h, stride_dother_s)[:, None] + columns
        _gradients(
            d_other + begin_dother, d_other_lse + begin_dother_lse, at_made, stride_dother_n, M, other_product,
            other_log, shift, grad, other, other_lse, at_other, at_other_lse, at, mask, inside, top, divisor, N_OTHER,
            stride_other_n, stride_other_lse_n,
        )  # fmt: skip
