"""The kernels of `softmax_unaligned.py`: head, body and tail of a row.   LOG: as in `softmax_kernels.py`."""

import triton
import triton.language as tl

from tilewright.ops.exponential import exp
from tilewright.ops.opaque import opaque_fp32
from tilewright.ops.reduction.kernels.triton.packed_rows import (
    LOWEST,
    row_gradient,
    row_scale,
    scaled,
    weighted,
)
from tilewright.ops.unaligned_rows import body_of, edge_columns, lengths, row_max, row_sum, rows_and_columns


@triton.jit
def softmax_unaligned_kernel(
    y, x, M, N, stride_x,  # x, y: (M, N)
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """y = exp(x - max(x)) / sum(exp(x - max(x))), the short form."""
    PRECISE: tl.constexpr = y.dtype.element_ty == tl.float32
    VECTOR: tl.constexpr = 128 // y.dtype.element_ty.primitive_bitwidth  # elements in 16 bytes
    # Load the rows
    row_idx, offs = rows_and_columns(ROWS, BLOCK_N)
    x_start, y_start = row_idx.to(tl.int64) * stride_x, row_idx.to(tl.int64) * N
    head, body = lengths(x_start, N, VECTOR)
    edge_offs, edge_mask = edge_columns(head, body, N, VECTOR)
    mask = offs < body
    if ROWS > 1:
        mask = mask & (row_idx < M)
        edge_mask = edge_mask & (row_idx < M)
    x_body = tl.load(x + body_of(x_start, VECTOR) + offs, mask=mask, other=float("-inf"))
    x_edge = tl.load(x + x_start + edge_offs, mask=edge_mask, other=float("-inf")).to(tl.float32)
    # Maximum, exponentials and their sum
    m_i = tl.maximum(tl.maximum(row_max(x_body.to(tl.float32), ROWS), row_max(x_edge, ROWS)), LOWEST)
    e = exp(opaque_fp32(x_body, PACKED) - m_i, PRECISE)
    e_edge = exp(x_edge - m_i, PRECISE)
    scale = row_scale(row_sum(e, ROWS) + row_sum(e_edge, ROWS), LOG)
    # Scale and store
    if PACKED or LOG:
        y_fp32 = scaled(opaque_fp32(x_body, PACKED), m_i, scale, PRECISE, LOG)
    else:
        y_fp32 = e * scale
    tl.store(y + body_of(y_start, VECTOR) + offs, y_fp32.to(y.dtype.element_ty), mask=mask)
    if LOG:
        y_edge = scaled(x_edge, m_i, scale, PRECISE, LOG)
    else:
        y_edge = e_edge * scale
    tl.store(y + y_start + edge_offs, y_edge.to(y.dtype.element_ty), mask=edge_mask)


@triton.jit
def softmax_unaligned_long_kernel(
    y, x, N, stride_x,  # x, y: (M, N), N > HELD
    HELD: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr, NUM_STAGES: tl.constexpr, PACKED: tl.constexpr,
    LOG: tl.constexpr,
):  # fmt: skip
    """y as above, the long form.  The body may be shorter than HELD."""
    PRECISE: tl.constexpr = y.dtype.element_ty == tl.float32
    VECTOR: tl.constexpr = 128 // y.dtype.element_ty.primitive_bitwidth  # elements in 16 bytes
    # Dimension 1 is spread over the threads: maxima and sums over dimension 0 stay in a thread.
    STEP: tl.constexpr = STEPS * LANES
    lanes = tl.arange(0, LANES)[None, :]
    offs_held = tl.arange(0, HELD // LANES)[:, None] * LANES + lanes
    offs = tl.arange(0, STEPS)[:, None] * LANES + lanes
    x_start, y_start = tl.program_id(0).to(tl.int64) * stride_x, tl.program_id(0).to(tl.int64) * N
    head, body = lengths(x_start, N, VECTOR)
    edge_offs, edge_mask = edge_columns(head, body, N, VECTOR)
    x_ptr, y_ptr = x + body_of(x_start, VECTOR), y + body_of(y_start, VECTOR)

    # First pass: running maximum and sum in every lane
    held_mask = offs_held < body
    x_edge = tl.load(x + x_start + edge_offs, mask=edge_mask, other=float("-inf")).to(tl.float32)
    x_held = tl.load(x_ptr + offs_held, mask=held_mask, other=float("-inf"), eviction_policy="evict_first")
    x_fp32 = x_held.to(tl.float32)
    m_i = tl.maximum(tl.max(x_fp32, 0), LOWEST)
    l_i = tl.sum(exp(x_fp32 - m_i[None, :], PRECISE), 0)
    for start in tl.range(HELD, body, STEP, num_stages=NUM_STAGES):
        part = tl.load(x_ptr + start + offs, mask=offs < body - start, other=float("-inf")).to(tl.float32)
        m_new = tl.maximum(m_i, tl.max(part, 0))
        l_i = l_i * exp(m_i - m_new, PRECISE) + tl.sum(exp(part - m_new[None, :], PRECISE), 0)
        m_i = m_new
    # Combine the lanes and the edges
    largest = tl.maximum(tl.max(m_i, 0), tl.max(x_edge, 0))
    l_edge = tl.sum(exp(x_edge - largest, PRECISE), 0)
    scale = row_scale(tl.sum(l_i * exp(m_i - largest, PRECISE), 0) + l_edge, LOG)
    y_edge = scaled(x_edge, largest, scale, PRECISE, LOG)
    tl.store(y + y_start + edge_offs, y_edge.to(y.dtype.element_ty), mask=edge_mask)

    # Second pass, backwards: scale and store
    last = HELD + (tl.cdiv(body - HELD, STEP) - 1) * STEP
    for back in tl.range(0, body - HELD, STEP, num_stages=NUM_STAGES):
        start = last - back
        mask = offs < body - start
        part = tl.load(x_ptr + start + offs, mask=mask, eviction_policy="evict_first").to(tl.float32)
        y_fp32 = scaled(part, largest, scale, PRECISE, LOG)
        tl.store(y_ptr + start + offs, y_fp32.to(y.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    y_fp32 = scaled(opaque_fp32(x_held, PACKED), largest, scale, PRECISE, LOG)
    tl.store(y_ptr + offs_held, y_fp32.to(y.dtype.element_ty), mask=held_mask, eviction_policy="evict_first")


@triton.jit
def softmax_unaligned_part_kernel(maxima, sums, x, N, parts, stride_x, BLOCK_N: tl.constexpr):
    """Maximum and sum of exponentials of one part of a row; head and tail belong to the first.

    maxima, sums: (M, parts)
    """
    PRECISE: tl.constexpr = x.dtype.element_ty == tl.float32
    VECTOR: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth  # elements in 16 bytes
    part = tl.program_id(0) % parts
    x_start = (tl.program_id(0) // parts).to(tl.int64) * stride_x
    head, body = lengths(x_start, N, VECTOR)
    offs = part * BLOCK_N + tl.arange(0, BLOCK_N)
    edge_offs, edge_mask = edge_columns(head, body, N, VECTOR)
    x_fp32 = tl.load(x + body_of(x_start, VECTOR) + offs, mask=offs < body, other=float("-inf")).to(tl.float32)
    x_edge = tl.load(x + x_start + edge_offs, mask=edge_mask & (part == 0), other=float("-inf")).to(tl.float32)
    m_i = tl.maximum(tl.maximum(tl.max(x_fp32, 0), tl.max(x_edge, 0)), LOWEST)
    tl.store(maxima + tl.program_id(0), m_i)
    l_i = tl.sum(exp(x_fp32 - m_i, PRECISE), 0) + tl.sum(exp(x_edge - m_i, PRECISE), 0)
    tl.store(sums + tl.program_id(0), l_i)


@triton.jit
def softmax_unaligned_scale_kernel(
    y, maxima, sums, x, N, parts, stride_x,  # maxima, sums: (M, parts)
    PARTS: tl.constexpr, BLOCK_N: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """y of one part of a row, from maxima and sums of all its parts."""
    # Load the part
    PRECISE: tl.constexpr = x.dtype.element_ty == tl.float32
    VECTOR: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth  # elements in 16 bytes
    row_idx, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    x_start, y_start = row_idx.to(tl.int64) * stride_x, row_idx.to(tl.int64) * N
    head, body = lengths(x_start, N, VECTOR)
    offs = part * BLOCK_N + tl.arange(0, BLOCK_N)
    edge_offs, edge_mask = edge_columns(head, body, N, VECTOR)
    edge_mask = edge_mask & (part == 0)
    x_fp32 = tl.load(x + body_of(x_start, VECTOR) + offs, mask=offs < body).to(tl.float32)
    x_edge = tl.load(x + x_start + edge_offs, mask=edge_mask).to(tl.float32)
    # Combine maxima and sums of the parts
    offs_p = tl.arange(0, PARTS)
    m_i = tl.load(maxima + row_idx * parts + offs_p, mask=offs_p < parts, other=LOWEST)
    l_i = tl.load(sums + row_idx * parts + offs_p, mask=offs_p < parts, other=0.0)
    largest = tl.max(m_i, 0)
    scale = row_scale(tl.sum(l_i * exp(m_i - largest, PRECISE), 0), LOG)
    # Scale and store
    y_fp32 = scaled(x_fp32, largest, scale, PRECISE, LOG)
    y_edge = scaled(x_edge, largest, scale, PRECISE, LOG)
    tl.store(y + body_of(y_start, VECTOR) + offs, y_fp32.to(y.dtype.element_ty), mask=offs < body)
    tl.store(y + y_start + edge_offs, y_edge.to(y.dtype.element_ty), mask=edge_mask)


@triton.jit
def softmax_unaligned_backward_kernel(
    dx, dy, y, M, N, stride_dy, stride_y,  # dx, dy, y: (M, N)
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """dx = y * (dy - dot(dy, y)), the dot product over each row; LOG: dx = dy - exp(y) * sum(dy); the short form."""
    PRECISE: tl.constexpr = y.dtype.element_ty == tl.float32
    VECTOR: tl.constexpr = 128 // y.dtype.element_ty.primitive_bitwidth  # elements in 16 bytes
    # Load the rows
    row_idx, offs = rows_and_columns(ROWS, BLOCK_N)
    row_offsets = row_idx.to(tl.int64)
    y_start, dy_start, dx_start = row_offsets * stride_y, row_offsets * stride_dy, row_offsets * N
    head, body = lengths(y_start, N, VECTOR)
    edge_offs, edge_mask = edge_columns(head, body, N, VECTOR)
    mask = offs < body
    if ROWS > 1:
        mask = mask & (row_idx < M)
        edge_mask = edge_mask & (row_idx < M)
    y_body = tl.load(y + body_of(y_start, VECTOR) + offs, mask=mask, other=0.0)
    dy_body = tl.load(dy + body_of(dy_start, VECTOR) + offs, mask=mask, other=0.0)
    y_edge = tl.load(y + y_start + edge_offs, mask=edge_mask, other=0.0).to(tl.float32)
    dy_edge = tl.load(dy + dy_start + edge_offs, mask=edge_mask, other=0.0).to(tl.float32)
    # Compute and store dx
    body_terms = weighted(dy_body.to(tl.float32), y_body.to(tl.float32), LOG)
    dot = row_sum(body_terms, ROWS) + row_sum(weighted(dy_edge, y_edge, LOG), ROWS)
    dx_fp32 = row_gradient(opaque_fp32(dy_body, PACKED), opaque_fp32(y_body, PACKED), dot, PRECISE, LOG)
    tl.store(dx + body_of(dx_start, VECTOR) + offs, dx_fp32.to(dx.dtype.element_ty), mask=mask)
    dx_edge = row_gradient(dy_edge, y_edge, dot, PRECISE, LOG)
    tl.store(dx + dx_start + edge_offs, dx_edge.to(dx.dtype.element_ty), mask=edge_mask)


@triton.jit
def softmax_unaligned_backward_long_kernel(
    dx, dy, y, N, stride_dy, stride_y,  # dx, dy, y: (M, N), N > HELD
    HELD: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr, NUM_STAGES: tl.constexpr, PACKED: tl.constexpr,
    LOG: tl.constexpr,
):  # fmt: skip
    """dx as above, the long form.  The body may be shorter than HELD."""
    PRECISE: tl.constexpr = y.dtype.element_ty == tl.float32
    VECTOR: tl.constexpr = 128 // y.dtype.element_ty.primitive_bitwidth  # elements in 16 bytes
    STEP: tl.constexpr = STEPS * LANES
    lanes = tl.arange(0, LANES)[None, :]
    offs_held = tl.arange(0, HELD // LANES)[:, None] * LANES + lanes
    offs = tl.arange(0, STEPS)[:, None] * LANES + lanes
    row_idx = tl.program_id(0).to(tl.int64)
    y_start, dy_start, dx_start = row_idx * stride_y, row_idx * stride_dy, row_idx * N
    head, body = lengths(y_start, N, VECTOR)
    edge_offs, edge_mask = edge_columns(head, body, N, VECTOR)
    y_ptr, dy_ptr = y + body_of(y_start, VECTOR), dy + body_of(dy_start, VECTOR)
    dx_ptr = dx + body_of(dx_start, VECTOR)

    # First pass: the dot product
    held_mask = offs_held < body
    y_edge = tl.load(y + y_start + edge_offs, mask=edge_mask, other=0.0).to(tl.float32)
    dy_edge = tl.load(dy + dy_start + edge_offs, mask=edge_mask, other=0.0).to(tl.float32)
    y_held = tl.load(y_ptr + offs_held, mask=held_mask, other=0.0, eviction_policy="evict_first")
    dy_held = tl.load(dy_ptr + offs_held, mask=held_mask, other=0.0, eviction_policy="evict_first")
    dots = tl.sum(weighted(dy_held.to(tl.float32), y_held.to(tl.float32), LOG), 0)
    for start in tl.range(HELD, body, STEP, num_stages=NUM_STAGES):
        mask = offs < body - start
        y_fp32 = tl.load(y_ptr + start + offs, mask=mask, other=0.0).to(tl.float32)
        dy_fp32 = tl.load(dy_ptr + start + offs, mask=mask, other=0.0).to(tl.float32)
        dots += tl.sum(weighted(dy_fp32, y_fp32, LOG), 0)
    dot = tl.sum(dots, 0) + tl.sum(weighted(dy_edge, y_edge, LOG), 0)
    dx_edge = row_gradient(dy_edge, y_edge, dot, PRECISE, LOG)
    tl.store(dx + dx_start + edge_offs, dx_edge.to(dx.dtype.element_ty), mask=edge_mask)

    # Second pass, backwards: dx
    last = HELD + (tl.cdiv(body - HELD, STEP) - 1) * STEP
    for back in tl.range(0, body - HELD, STEP, num_stages=NUM_STAGES):
        start = last - back
        mask = offs < body - start
        y_fp32 = tl.load(y_ptr + start + offs, mask=mask, eviction_policy="evict_first").to(tl.float32)
        dy_fp32 = tl.load(dy_ptr + start + offs, mask=mask, eviction_policy="evict_first").to(tl.float32)
        dx_fp32 = row_gradient(dy_fp32, y_fp32, dot, PRECISE, LOG)
        tl.store(dx_ptr + start + offs, dx_fp32.to(dx.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    dx_fp32 = row_gradient(opaque_fp32(dy_held, PACKED), opaque_fp32(y_held, PACKED), dot, PRECISE, LOG)
    tl.store(dx_ptr + offs_held, dx_fp32.to(dx.dtype.element_ty), mask=held_mask, eviction_policy="evict_first")
