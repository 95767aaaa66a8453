"""Kernels of cross entropy: the loss of rows, sums over rows, the gradient of a row.  A row is one program's."""

import triton
import triton.language as tl

from tilewright.ops.exponential import exp
from tilewright.ops.loss.kernels.triton.row_statistics import (
    capped,
    edges,
    head_and_body,
    log,
    row_loss,
    row_statistics,
    target_of,
)
from tilewright.ops.opaque import opaque_fp32


@triton.jit
def cross_entropy_rows_kernel(
    loss, lse, rest, x, target, weight, N, stride_x, ignore_index, smoothing, z_loss, softcap,
    STEPS: tl.constexpr, LANES: tl.constexpr, NUM_STAGES: tl.constexpr, ALIGNED: tl.constexpr,
    SOFTCAP: tl.constexpr, SMOOTH: tl.constexpr, WEIGHTED: tl.constexpr, ADD_Z: tl.constexpr,
):  # fmt: skip
    """Cross entropy and logsumexp of each row, and what of the latter was rounded off; ADD_Z: with the z-loss."""
    row = tl.program_id(0).to(tl.int64)
    start = row * stride_x
    t, is_row, is_class, w_t = target_of(target, weight, row, N, ignore_index, WEIGHTED)
    x_t = tl.load(x + start + t, mask=is_class, other=float("nan")).to(tl.float32)
    x_t, _ = capped(x_t, softcap, SOFTCAP, True)
    row_max, total, weighted, weights = row_statistics(
        x, x_t, weight, start, N, is_row, softcap,
        STEPS, LANES, NUM_STAGES, ALIGNED, SOFTCAP, SMOOTH, WEIGHTED, False, 0, False,
    )  # fmt: skip
    loss_i, lse_i = row_loss(x_t, w_t, row_max, total, weighted, weights, N, smoothing, SMOOTH)
    if ADD_Z:
        loss_i += z_loss * lse_i * lse_i
    tl.store(loss + row, tl.where(is_row, loss_i, 0.0))
    tl.store(lse + row, tl.where(is_row, lse_i, 0.0))
    rest_i = (row_max - lse_i) + log(total)
    tl.store(rest + row, tl.where(is_row & (tl.abs(rest_i) < 1.0), rest_i, 0.0))  # not of infinities


@triton.jit
def batch_kernel(
    loss, totals, rows, lse, target, weight, M, N, ignore_index, z_loss,
    BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, COUNT: tl.constexpr, REDUCE: tl.constexpr, MEAN: tl.constexpr,
    SMOOTH: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """One program.  COUNT: the totals, from the targets.   REDUCE: the loss of the batch from those of its rows."""
    offs = tl.arange(0, BLOCK)
    weights_i = tl.zeros((BLOCK,), tl.float32)
    count_i = tl.zeros((BLOCK,), tl.int32)
    rows_i = tl.zeros((BLOCK,), tl.float32)
    z_i = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, M, BLOCK):
        mask = offs < M - first
        if COUNT:
            t = tl.load(target + first + offs, mask=mask, other=0).to(tl.int64)
            is_row = mask & (t != ignore_index)
            count_i += is_row.to(tl.int32)
            if WEIGHTED:
                is_class = is_row & (t >= 0) & (t < N)
                w = tl.load(weight + t, mask=is_class, other=float("nan")).to(tl.float32)
                weights_i += tl.where(is_row, w, 0.0)
        if REDUCE:
            rows_i += tl.load(rows + first + offs, mask=mask, other=0.0)
            if Z:
                value = tl.load(lse + first + offs, mask=mask, other=0.0)
                z_i += value * value
    count, of_rows = 0.0, 0.0
    if COUNT:
        count = tl.sum(count_i, 0).to(tl.float32)
        of_rows = count
        of_classes = N * 1.0
        if WEIGHTED:
            of_rows = tl.sum(weights_i, 0)
            if SMOOTH:
                sums = tl.zeros((BLOCK,), tl.float32)
                for first in range(0, N, BLOCK):
                    sums += tl.load(weight + first + offs, mask=offs < N - first, other=0.0).to(tl.float32)
                of_classes = tl.sum(sums, 0)
        tl.store(totals, of_rows)
        tl.store(totals + 1, count)
        tl.store(totals + 2, of_classes)
    elif MEAN:
        of_rows, count = tl.load(totals), tl.load(totals + 1)
    if REDUCE:
        result, z = tl.sum(rows_i, 0), z_loss * tl.sum(z_i, 0)
        if MEAN:
            result = tl.div_rn(result, of_rows)
            z = tl.div_rn(z, count)
        if Z:
            result += z
        tl.store(loss, result)


@triton.jit
def gradient_factors(
    totals, dloss, dlse, row, is_row, w_t, lse_i, weights, N, smoothing, z_loss,
    MEAN: tl.constexpr, VECTOR_DLOSS: tl.constexpr, HAS_DLOSS: tl.constexpr, HAS_DLSE: tl.constexpr,
    SMOOTH: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """dx_j = of_p * p_j - (j is the target) * of_target - of_weight * w_j of a row.

    Without a dloss it is 1, or 0 where the gradient of the logsumexp is all there is.
    """
    g = 0.0 if HAS_DLSE else 1.0
    if HAS_DLOSS:
        g = tl.load(dloss + row) if VECTOR_DLOSS else tl.load(dloss)
        g = g.to(tl.float32)
    g_z = g
    if MEAN:
        g_z = tl.div_rn(g, tl.load(totals + 1))
        g = tl.div_rn(g, tl.load(totals))
    of_target = g * w_t
    of_weight = 0.0
    of_p = of_target
    if SMOOTH:
        of_target *= 1.0 - smoothing
        of_weight = g * (smoothing / (N * 1.0))
        of_p = of_target + of_weight * weights
    if Z:
        of_p += g_z * 2.0 * z_loss * lse_i
    if HAS_DLSE:
        of_p += tl.load(dlse + row).to(tl.float32)
    return tl.where(is_row, of_p, 0.0), tl.where(is_row, of_target, 0.0), tl.where(is_row, of_weight, 0.0)


@triton.jit
def gradient_of(
    part, columns, mask, weight, t, shift, rest, of_p, of_target, of_weight, softcap,
    SOFTCAP: tl.constexpr, SMOOTH: tl.constexpr, WEIGHTED: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """The gradient of some logits of a row, float32, with p = e^(x - shift - rest); `part` is -inf beyond its end."""
    x, tanh = capped(part, softcap, SOFTCAP, PRECISE)
    x = x - shift
    if PRECISE:
        x -= rest
    dx = exp(x, PRECISE) * of_p
    if SMOOTH:
        if WEIGHTED:
            dx -= of_weight * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
        else:
            dx -= of_weight
    dx = tl.where(columns == t, dx - of_target, dx)
    if SOFTCAP:
        dx *= 1.0 - tanh * tanh
    return dx


@triton.jit
def cross_entropy_gradient_kernel(
    dx, x, target, weight, lse, rest, totals, dloss, dlse, N, parts, stride_dx, stride_x, ignore_index, smoothing,
    z_loss, softcap,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr, ALIKE: tl.constexpr, SOFTCAP: tl.constexpr, SMOOTH: tl.constexpr,
    WEIGHTED: tl.constexpr, MEAN: tl.constexpr, VECTOR_DLOSS: tl.constexpr, HAS_DLOSS: tl.constexpr,
    HAS_DLSE: tl.constexpr, Z: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    """dx of one part of a row; dx may be x itself.  ALIKE: rows of dx begin as far from a boundary as those of x."""
    PRECISE: tl.constexpr = x.dtype.element_ty == tl.float32
    VECTOR: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    row, part_idx = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    t, is_row, is_class, w_t = target_of(target, weight, row, N, ignore_index, WEIGHTED)
    if not WEIGHTED:
        w_t = tl.where(is_class, 1.0, float("nan"))
    lse_i = tl.load(lse + row)
    rest_i = tl.load(rest + row) if HAS_REST else 0.0
    weights = tl.load(totals + 2)
    of_p, of_target, of_weight = gradient_factors(
        totals, dloss, dlse, row, is_row, w_t, lse_i, weights, N, smoothing, z_loss,
        MEAN, VECTOR_DLOSS, HAS_DLOSS, HAS_DLSE, SMOOTH, Z,
    )  # fmt: skip
    start, start_dx = row * stride_x, row * stride_dx
    head, body, begin = head_and_body(start, N, VECTOR, ALIGNED)
    offs = part_idx * BLOCK + tl.arange(0, BLOCK)
    mask = offs < body
    part = tl.load(x + begin + offs, mask=mask & is_row, other=float("-inf"), eviction_policy="evict_first")
    value = gradient_of(
        part.to(tl.float32), head + offs, mask & is_row, weight, t, lse_i, rest_i, of_p, of_target, of_weight, softcap,
        SOFTCAP, SMOOTH, WEIGHTED, PRECISE,
    )  # fmt: skip
    value = tl.where(is_row, value, 0.0)
    to = dx + (start_dx + head)
    if ALIKE and not ALIGNED:
        to = dx + (start_dx + (VECTOR - 1)) // VECTOR * VECTOR
    tl.store(to + offs, value.to(dx.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    if not ALIGNED:  # noqa: SIM102 - known to the compiler
        if part_idx == 0:
            columns, exists = edges(head, body, N, VECTOR)
            edge = tl.load(x + start + columns, mask=exists & is_row, other=float("-inf")).to(tl.float32)
            edge_value = gradient_of(
                edge, columns, exists & is_row, weight, t, lse_i, rest_i, of_p, of_target, of_weight, softcap,
                SOFTCAP, SMOOTH, WEIGHTED, PRECISE,
            )  # fmt: skip
            edge_value = tl.where(is_row, edge_value, 0.0)
            tl.store(dx + start_dx + columns, edge_value.to(dx.dtype.element_ty), mask=exists)


@triton.jit
def cross_entropy_in_place_kernel(
    loss, lse, x, target, weight, totals, dloss, N, stride_x, ignore_index, smoothing, z_loss, softcap,
    STEPS: tl.constexpr, LANES: tl.constexpr, NUM_STAGES: tl.constexpr, ALIGNED: tl.constexpr,
    SOFTCAP: tl.constexpr, SMOOTH: tl.constexpr, WEIGHTED: tl.constexpr, ADD_Z: tl.constexpr,
    MEAN: tl.constexpr, VECTOR_DLOSS: tl.constexpr, HAS_DLOSS: tl.constexpr, Z: tl.constexpr, HELD: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Loss and logsumexp of each row, then its gradient over it, backwards: what was read last is in the L2.

    The first HELD columns after the head stay in registers.
    """
    PRECISE: tl.constexpr = x.dtype.element_ty == tl.float32
    VECTOR: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    STEP: tl.constexpr = STEPS * LANES
    row = tl.program_id(0).to(tl.int64)
    start = row * stride_x
    t, is_row, is_class, w_t = target_of(target, weight, row, N, ignore_index, WEIGHTED)
    x_t = tl.load(x + start + t, mask=is_class, other=float("nan")).to(tl.float32)
    x_t, _ = capped(x_t, softcap, SOFTCAP, True)
    head, body, begin = head_and_body(start, N, VECTOR, ALIGNED)
    held = x_t
    if HELD:
        offs_held = tl.arange(0, HELD // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        mask_held = offs_held < body
        ptrs_held = x + begin + offs_held
        held = tl.load(ptrs_held, mask=mask_held & is_row, other=float("-inf"), eviction_policy="evict_first")
    row_max, total, weighted, weights = row_statistics(
        x, held, weight, start, N, is_row, softcap,
        STEPS, LANES, NUM_STAGES, ALIGNED, SOFTCAP, SMOOTH, WEIGHTED, True, HELD, PACKED,
    )  # fmt: skip
    loss_i, lse_i = row_loss(x_t, w_t, row_max, total, weighted, weights, N, smoothing, SMOOTH)
    if ADD_Z:
        loss_i += z_loss * lse_i * lse_i
    tl.store(loss + row, tl.where(is_row, loss_i, 0.0))
    lse_i = tl.where(is_row, lse_i, 0.0)
    tl.store(lse + row, lse_i)
    if not WEIGHTED:
        w_t = tl.where(is_class, 1.0, float("nan"))
    of_p, of_target, of_weight = gradient_factors(
        totals, dloss, dloss, row, is_row, w_t, lse_i, weights, N, smoothing, z_loss,
        MEAN, VECTOR_DLOSS, HAS_DLOSS, False, SMOOTH, Z,
    )  # fmt: skip
    of_p = tl.where(
        is_row, of_p * tl.div_rn(1.0, total), 0.0
    )  # p = e^(x - row_max) / total is exact where x is row_max
    offs = tl.arange(0, STEPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    last = HELD + (tl.cdiv(body - HELD, STEP) - 1) * STEP
    for back in tl.range(0, body - HELD, STEP, num_stages=NUM_STAGES):
        first = last - back
        mask = offs < body - first
        part = tl.load(x + begin + first + offs, mask=mask & is_row, other=float("-inf"), eviction_policy="evict_first")
        value = gradient_of(
            part.to(tl.float32), head + first + offs, mask & is_row, weight, t, row_max, 0.0, of_p, of_target,
            of_weight, softcap, SOFTCAP, SMOOTH, WEIGHTED, PRECISE,
        )  # fmt: skip
        value = tl.where(is_row, value, 0.0).to(x.dtype.element_ty)
        tl.store(x + begin + first + offs, value, mask=mask, eviction_policy="evict_first")
    if HELD:
        held_value = gradient_of(
            opaque_fp32(held, PACKED), head + offs_held, mask_held & is_row, weight, t, row_max, 0.0, of_p, of_target,
            of_weight, softcap, SOFTCAP, SMOOTH, WEIGHTED, PRECISE,
        )  # fmt: skip
        held_value = tl.where(is_row, held_value, 0.0).to(x.dtype.element_ty)
        tl.store(ptrs_held, held_value, mask=mask_held, eviction_policy="evict_first")
    if not ALIGNED:
        columns, exists = edges(head, body, N, VECTOR)
        edge = tl.load(x + start + columns, mask=exists & is_row, other=float("-inf")).to(tl.float32)
        edge_value = gradient_of(
            edge, columns, exists & is_row, weight, t, row_max, 0.0, of_p, of_target, of_weight, softcap,
            SOFTCAP, SMOOTH, WEIGHTED, PRECISE,
        )  # fmt: skip
        edge_value = tl.where(is_row, edge_value, 0.0)
        tl.store(x + start + columns, edge_value.to(x.dtype.element_ty), mask=exists)
