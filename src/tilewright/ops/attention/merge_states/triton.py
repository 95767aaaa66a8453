"""States of attention joined in Triton, there and back.  A program holds some rows of the result, whole, in registers.

First the logarithms of its rows, N numbers each: their maximum, then the sum of exp(lse_i - maximum), in the order of
the states.  Then o' = sum_i w_i o_i, w_i = exp(lse_i - maximum) / sum; the weights are computed twice rather than kept,
so that N is a number of run time.  Backwards do_i = w_i do, dlse_i = w_i (do . o_i - sum_j w_j do . o_j + dlse'): the
sum first, then all else, with a second reading of o_i which comes from L1.  (do . o' would spare that walk, but o' is
rounded and the difference cancels: for one state it must be 0.)

Traffic at bf16: forward reads N states of M * (2 * D + 4) bytes and writes one, so two states of 8192 x 32 heads with
D = 128 move 204 MB, 49 us at 4.2 TB/s; backward moves 2 * N + 1 of them, 81 us.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.exponential import exp
from tilewright.ops.rows import no_float64

MANY = 4096  # rows; tiles of 16 of them are two programs for every SM of an H200
WIDEST = 4096  # elements of a row; the backward has three float32 of each in registers
UNROLL = tl.constexpr(4)  # logarithms whose reads are on the way together: they do not depend on each other
AT_ONCE = tl.constexpr(2)  # o of so many states forwards; four spill in unaligned rows (gfx942) and in float32 (sm_80)


class Config(NamedTuple):
    rows: int  # of one program
    num_warps: int


def _configure(bucket: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> Config:
    """Tiles of `nbytes` a state, a 16-byte read a thread (two spill), and at most 32 rows, whose addresses fit beside
    them; for few rows, as in decoding, a tile of one warp, so that there are programs for every SM.
    """
    m, d, _ = bucket
    row = triton.next_power_of_2(d) * dtype.itemsize
    rows = max(1, min(32, (nbytes if m >= MANY else 512) // row))
    return Config(rows, num_warps=max(1, min(8, rows * row // 512)))


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    return _configure(bucket, dtype, 4096)


def configure_backward(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    return _configure(bucket, dtype, 2048)


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """4 to 32 elements of a tile in each thread."""
    m, d, _ = bucket
    block = triton.next_power_of_2(d)
    return tuple(
        Config(rows, warps)
        for rows in (1, 2, 4, 8, 16, 32)
        for warps in (1, 2, 4, 8)
        if rows <= m and 4 <= rows * block // (32 * warps) <= 32
    )


def _every(choose: Callable[[tuple[int, ...], torch.dtype], Config]) -> tuple[Config, ...]:
    """What `choose` returns for heads of usual widths."""
    sizes = [(m, d, 2) for m in (1, MANY) for d in (64, 128, 256, 512)]
    return tuple(dict.fromkeys(choose(size, dtype) for size in sizes for dtype in (torch.bfloat16, torch.float32)))


@triton.jit
def _indices(at, H, S):
    """(b, h, s) of rows `at` of (B, H, S); without a division for sizes of 1, which are constants."""
    return at // S // H, at // S % H, at % S


@triton.jit
def _places(b, h, s, stride_b, stride_h, stride_s):
    return b * stride_b + h * stride_h + s * stride_s


@triton.jit
def _step(stride_n):
    return tl.full([], 1, tl.int64) * stride_n  # Triton makes a Python integer of a stride of 1, which has no dtype


@triton.jit
def _ahead(o, lse, at_o, at_lse, mask, inside):
    """(o, lse) of one state: reads that wait for nothing, and a state that is not there is one that saw no key."""
    return tl.load(o + at_o, mask=mask, other=0.0), tl.load(lse + at_lse, mask=inside, other=float("-inf"))


@triton.jit
def _top(top, lse, places, mask, START: tl.constexpr, N, stride_n):
    """The larger of `top` and the logarithms of states START to N, for each row."""
    for i in tl.range(START, N, loop_unroll_factor=UNROLL):
        top = tl.maximum(top, tl.load(lse + i * _step(stride_n) + places, mask=mask, other=0.0))
    return top


@triton.jit
def _total(total, lse, places, mask, top, START: tl.constexpr, N, stride_n):
    """`total` and the weights of states START to N, not yet divided."""
    for i in tl.range(START, N, loop_unroll_factor=UNROLL):
        total += exp(tl.load(lse + i * _step(stride_n) + places, mask=mask, other=0.0) - top, True)
    return total


@triton.jit
def _denominator(
    log, next_log, lse, other_lse, at_lse, at_other_lse, inside, N, N_OTHER, stride_n, stride_other_n, AHEAD: tl.constexpr
):
    """(maximum of the logarithms, sum of exp(lse_i - maximum), what the two states ahead add to it) of each row; the
    first two are 0 where no state saw a key.
    """
    top = tl.maximum(tl.maximum(tl.full(log.shape, float("-inf"), tl.float32), log), next_log)
    top = _top(top, lse, at_lse, inside, AHEAD, N, stride_n)
    if other_lse is not None:
        top = _top(top, other_lse, at_other_lse, inside, 1, N_OTHER, stride_other_n)
    top = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    share, next_share = exp(log - top, True), exp(next_log - top, True)
    if other_lse is None:
        total = _total(share + next_share, lse, at_lse, inside, top, AHEAD, N, stride_n)
    else:
        total = _total(share, lse, at_lse, inside, top, AHEAD, N, stride_n) + next_share
        total = _total(total, other_lse, at_other_lse, inside, top, 1, N_OTHER, stride_other_n)
    return top, total, share, next_share


@triton.jit
def _weighted(state, log, weight):
    """By selection: what a state that saw no key holds may be NaN."""
    return tl.where((log == float("-inf"))[:, None], 0.0, state.to(tl.float32) * weight[:, None])


@triton.jit
def _add(acc, o, lse, at_o, at_lse, mask, inside, top, divisor, START: tl.constexpr, N, stride_n, stride_lse_n):
    """acc (ROWS, BLOCK_D) and the weighted o of states START to N."""
    for i in tl.range(START, N, loop_unroll_factor=AT_ONCE):
        log = tl.load(lse + i * _step(stride_lse_n) + at_lse, mask=inside, other=0.0)
        state = tl.load(o + i * _step(stride_n) + at_o, mask=mask, other=0.0)
        acc += _weighted(state, log, exp(log - top, True) / divisor)
    return acc


@triton.jit
def _merge_kernel(
    out, out_lse, o, lse, other, other_lse, M, H, S, D, N, N_OTHER,  # o, other: (N, B, H, S, D)   lse: (N, B, H, S)
    stride_out_b, stride_out_h, stride_out_s, stride_n, stride_b, stride_h, stride_s,
    stride_lse_n, stride_lse_b, stride_lse_h, stride_lse_s,
    stride_other_n, stride_other_b, stride_other_h, stride_other_s,
    stride_other_lse_n, stride_other_lse_b, stride_other_lse_h, stride_other_lse_s,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip  # out: (B, H, S, D)   out_lse: (B, H, S)   M = B * H * S
    AHEAD: tl.constexpr = 2 if other is None else 1
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b, h, s = _indices(at, H, S)
    columns = tl.arange(0, BLOCK_D)[None, :]
    inside = at < M
    mask = inside[:, None] & (columns < D)
    at_lse = _places(b, h, s, stride_lse_b, stride_lse_h, stride_lse_s)
    at_other_lse = _places(b, h, s, stride_other_lse_b, stride_other_lse_h, stride_other_lse_s)
    at_o = _places(b, h, s, stride_b, stride_h, stride_s)[:, None] + columns
    at_other = _places(b, h, s, stride_other_b, stride_other_h, stride_other_s)[:, None] + columns

    state, log = _ahead(o, lse, at_o, at_lse, mask, inside)
    if other is None:
        at_next, at_next_lse = at_o + _step(stride_n), at_lse + _step(stride_lse_n)
        next_state, next_log = _ahead(o, lse, at_next, at_next_lse, mask & (N > 1), inside & (N > 1))
    else:
        next_state, next_log = _ahead(other, other_lse, at_other, at_other_lse, mask, inside)
    top, total, share, next_share = _denominator(
        log, next_log, lse, other_lse, at_lse, at_other_lse, inside, N, N_OTHER, stride_lse_n, stride_other_lse_n, AHEAD
    )
    divisor = tl.where(total == 0.0, 1.0, total)

    acc = tl.zeros((ROWS, BLOCK_D), tl.float32) + _weighted(state, log, share / divisor)
    if other is None:
        acc += _weighted(next_state, next_log, next_share / divisor)
    acc = _add(acc, o, lse, at_o, at_lse, mask, inside, top, divisor, AHEAD, N, stride_n, stride_lse_n)
    if other is not None:
        acc += _weighted(next_state, next_log, next_share / divisor)
        acc = _add(
            acc, other, other_lse, at_other, at_other_lse, mask, inside, top, divisor, 1, N_OTHER, stride_other_n,
            stride_other_lse_n,
        )  # fmt: skip
    at_out = _places(b, h, s, stride_out_b, stride_out_h, stride_out_s)[:, None] + columns
    tl.store(out + at_out, acc.to(out.dtype.element_ty), mask=mask)
    tl.store(out_lse + at, tl.where(total == 0.0, float("-inf"), top + tl.log(divisor)), mask=inside)


@triton.jit
def _along(
    total, grad, o, lse, at_o, at_lse, mask, inside, top, divisor, START: tl.constexpr, N, stride_n, stride_lse_n
):
    """total (ROWS,) and the weighted products do . o_i of states START to N."""
    for i in tl.range(START, N):
        log = tl.load(lse + i * _step(stride_lse_n) + at_lse, mask=inside, other=0.0)
        state = tl.load(o + i * _step(stride_n) + at_o, mask=mask, other=0.0).to(tl.float32)
        product = tl.sum(grad * state, 1) * (exp(log - top, True) / divisor)
        total += tl.where(log == float("-inf"), 0.0, product)
    return total


@triton.jit
def _store_gradients(d_o, d_lse, at_do, at, mask, inside, log, weight, product, shift, grad):
    """Of one state.  product: (ROWS,), do . o_i   shift: (ROWS,), dlse' less the sum of all weighted products"""
    blind = log == float("-inf")
    d_state = tl.where(blind[:, None], 0.0, weight[:, None] * grad)
    tl.store(d_o + at_do, d_state.to(d_o.dtype.element_ty), mask=mask)
    tl.store(d_lse + at, tl.where(blind, 0.0, weight * (product + shift)), mask=inside)


@triton.jit
def _gradients(
    d_o, d_lse, at_do, stride_dn, stride_dlse_n, shift, grad, o, lse, at_o, at_lse, at, mask, inside, top, divisor,
    START: tl.constexpr, N, stride_n, stride_lse_n,
):  # fmt: skip  # d_lse: (N, M) contiguous
    for i in tl.range(START, N):
        log = tl.load(lse + i * _step(stride_lse_n) + at_lse, mask=inside, other=0.0)
        state = tl.load(o + i * _step(stride_n) + at_o, mask=mask, other=0.0).to(tl.float32)
        _store_gradients(
            d_o + i * _step(stride_dn), d_lse + i * _step(stride_dlse_n), at_do, at, mask, inside, log,
            exp(log - top, True) / divisor, tl.sum(grad * state, 1), shift, grad,
        )  # fmt: skip


@triton.jit
def _merge_backward_kernel(
    d_o, d_lse, d_other, d_other_lse, do, dlse, o, lse, other, other_lse, M, H, S, D, N, N_OTHER,
    stride_dn, stride_db, stride_dh, stride_ds, stride_dother_n, stride_dother_b, stride_dother_h, stride_dother_s,
    stride_do_b, stride_do_h, stride_do_s, stride_n, stride_b, stride_h, stride_s,
    stride_lse_n, stride_lse_b, stride_lse_h, stride_lse_s,
    stride_other_n, stride_other_b, stride_other_h, stride_other_s,
    stride_other_lse_n, stride_other_lse_b, stride_other_lse_h, stride_other_lse_s,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip  # shapes as above; d_* as what they are gradients of, do: (B, H, S, D)   dlse: (B, H, S) contiguous
    AHEAD: tl.constexpr = 2 if other is None else 1
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b, h, s = _indices(at, H, S)
    columns = tl.arange(0, BLOCK_D)[None, :]
    inside = at < M
    mask = inside[:, None] & (columns < D)
    at_lse = _places(b, h, s, stride_lse_b, stride_lse_h, stride_lse_s)
    at_other_lse = _places(b, h, s, stride_other_lse_b, stride_other_lse_h, stride_other_lse_s)
    at_o = _places(b, h, s, stride_b, stride_h, stride_s)[:, None] + columns
    at_other = _places(b, h, s, stride_other_b, stride_other_h, stride_other_s)[:, None] + columns
    at_do = _places(b, h, s, stride_do_b, stride_do_h, stride_do_s)[:, None] + columns

    grad = tl.load(do + at_do, mask=mask, other=0.0)
    state, log = _ahead(o, lse, at_o, at_lse, mask, inside)
    if other is None:
        at_next, at_next_lse = at_o + _step(stride_n), at_lse + _step(stride_lse_n)
        next_state, next_log = _ahead(o, lse, at_next, at_next_lse, mask & (N > 1), inside & (N > 1))
    else:
        next_state, next_log = _ahead(other, other_lse, at_other, at_other_lse, mask, inside)
    shift = tl.zeros((ROWS,), tl.float32)
    if dlse is not None:
        shift = tl.load(dlse + at, mask=inside, other=0.0)
    top, total, share, next_share = _denominator(
        log, next_log, lse, other_lse, at_lse, at_other_lse, inside, N, N_OTHER, stride_lse_n, stride_other_lse_n, AHEAD
    )
    divisor = tl.where(total == 0.0, 1.0, total)
    weight, next_weight = share / divisor, next_share / divisor

    grad = grad.to(tl.float32)
    product, next_product = tl.sum(grad * state.to(tl.float32), 1), tl.sum(grad * next_state.to(tl.float32), 1)
    along = tl.where(log == float("-inf"), 0.0, product * weight)
    next_along = tl.where(next_log == float("-inf"), 0.0, next_product * next_weight)
    if other is None:
        along += next_along
    along = _along(along, grad, o, lse, at_o, at_lse, mask, inside, top, divisor, AHEAD, N, stride_n, stride_lse_n)
    if other is not None:
        along = _along(
            along + next_along, grad, other, other_lse, at_other, at_other_lse, mask, inside, top, divisor, 1, N_OTHER,
            stride_other_n, stride_other_lse_n,
        )  # fmt: skip
    shift -= along

    at_made = _places(b, h, s, stride_db, stride_dh, stride_ds)[:, None] + columns
    _store_gradients(d_o, d_lse, at_made, at, mask, inside, log, weight, product, shift, grad)
    if other is None:
        _store_gradients(
            d_o + _step(stride_dn), d_lse + _step(M), at_made, at, mask & (N > 1), inside & (N > 1), next_log,
            next_weight, next_product, shift, grad,
        )  # fmt: skip
    _gradients(
        d_o, d_lse, at_made, stride_dn, M, shift, grad, o, lse, at_o, at_lse, at, mask, inside, top, divisor, AHEAD, N,
        stride_n, stride_lse_n,
    )  # fmt: skip
    if other is not None:
        at_made = _places(b, h, s, stride_dother_b, stride_dother_h, stride_dother_s)[:, None] + columns
        _store_gradients(
            d_other, d_other_lse, at_made, at, mask, inside, next_log, next_weight, next_product, shift, grad
        )
        _gradients(
            d_other, d_other_lse, at_made, stride_dother_n, M, shift, grad, other, other_lse, at_other, at_other_lse,
            at, mask, inside, top, divisor, 1, N_OTHER, stride_other_n, stride_other_lse_n,
        )  # fmt: skip


_forward, _backward = TritonKernel(_merge_kernel), TritonKernel(_merge_backward_kernel)


def _strides(t: Tensor | None) -> tuple[int, ...]:
    """The first four, of states, batches, heads and rows."""
    return (0,) * 4 if t is None else t.stride()[:4]


def _sizes(o: Tensor, other: Tensor | None) -> tuple[int, ...]:
    n, b, h, s, d = o.shape
    return b * h * s, h, s, d, n, 0 if other is None else other.shape[0]


def _supports(*args: Any) -> str | None:
    d = next(a for a in args if isinstance(a, Tensor)).shape[-1]
    return no_float64(*args) or (f"takes rows of at most {WIDEST} elements" if d > WIDEST else None)


@register_impl(
    "merge_states",
    backend="triton",
    configure=configure,
    config_type=Config,
    configs=_every(configure),
    candidates=candidates,
    supports=_supports,
)
def launch(
    outs: tuple[Tensor, Tensor],
    o: Tensor,
    lse: Tensor,
    other: Tensor | None,
    other_lse: Tensor | None,
    out_dtype: torch.dtype,
    *,
    config: Config,
) -> None:
    sizes = _sizes(o, other)
    stacks = (t for stack in (o, lse, other, other_lse) for t in _strides(stack))
    args = (*outs, o, lse, other, other_lse, *sizes, *outs[0].stride()[:3], *stacks)
    constants = (config.rows, triton.next_power_of_2(o.shape[4]))
    _forward((triton.cdiv(sizes[0], config.rows),), args, constants, num_warps=config.num_warps)


@register_impl(
    "merge_states",
    backend="triton",
    direction="bwd",
    configure=configure_backward,
    config_type=Config,
    configs=_every(configure_backward),
    candidates=candidates,
    supports=_supports,
)
def launch_backward(
    outs: tuple[Tensor, Tensor, Tensor, Tensor],
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    other: Tensor | None,
    other_lse: Tensor | None,
    out_dtype: torch.dtype,
    *,
    config: Config,
) -> None:
    d_o, d_lse, d_other, d_other_lse = outs
    pair = other is not None
    sizes = _sizes(o, other)
    made = (*_strides(d_o), *_strides(d_other if pair else None))
    stacks = (t for stack in (o, lse, other, other_lse) for t in _strides(stack))
    gradients = (d_o, d_lse, d_other if pair else None, d_other_lse if pair else None)
    args = (*gradients, do, dlse, o, lse, other, other_lse, *sizes, *made, *do.stride()[:3], *stacks)
    constants = (config.rows, triton.next_power_of_2(o.shape[4]))
    _backward((triton.cdiv(sizes[0], config.rows),), args, constants, num_warps=config.num_warps)
