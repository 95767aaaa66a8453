"""The kernels of `softmax.py`: rows that the compiler sees to be whole vectors, or that are read by the element.

LOG: the logarithm of softmax, y = (x - max(x)) - log(sum(exp(x - max(x)))), and backwards dx = dy - exp(y) * sum(dy).
"""

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


@triton.jit
def softmax_kernel(
    y, x, M, N, stride_x,  # x, y: (M, N)
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """y = exp(x - max(x)) / sum(exp(x - max(x))), the short form."""
    # Load the rows
    PRECISE: tl.constexpr = y.dtype.element_ty == tl.float32
    col_offsets = tl.arange(0, BLOCK_N)[None, :]
    row_idx = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = col_offsets < N
    if ROWS > 1:  # with one row a program no row is out of range, and the mask takes one register less
        mask = mask & (row_idx < M)
    row_offsets = row_idx.to(tl.int64)
    row = tl.load(x + row_offsets * stride_x + col_offsets, mask=mask, other=float("-inf"))
    # Maximum, exponentials and their sum
    x_fp32 = row.to(tl.float32)
    m_i = tl.maximum(tl.max(x_fp32, 1), LOWEST)
    e = exp(x_fp32 - m_i[:, None], PRECISE)
    scale = row_scale(tl.sum(e, 1), LOG)
    # Scale and store
    if PACKED or LOG:
        y_fp32 = scaled(opaque_fp32(row, PACKED), m_i[:, None], scale[:, None], PRECISE, LOG)
    else:
        y_fp32 = e * scale[:, None]
    tl.store(y + row_offsets * N + col_offsets, y_fp32.to(y.dtype.element_ty), mask=mask)


@triton.jit
def softmax_long_kernel(
    y, x, N, stride_x,  # x, y: (M, N), N > HELD
    HELD: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr, NUM_STAGES: tl.constexpr, PACKED: tl.constexpr,
    LOG: tl.constexpr,
):  # fmt: skip
    """y as above, the long form."""
    PRECISE: tl.constexpr = y.dtype.element_ty == tl.float32
    # Dimension 1 is spread over the threads: maxima and sums over dimension 0 stay in a thread.
    STEP: tl.constexpr = STEPS * LANES
    lanes = tl.arange(0, LANES)[None, :]
    offs_held = tl.arange(0, HELD // LANES)[:, None] * LANES + lanes
    offs = tl.arange(0, STEPS)[:, None] * LANES + lanes
    x += tl.program_id(0).to(tl.int64) * stride_x
    y += tl.program_id(0).to(tl.int64) * N

    # First pass: running maximum and sum in every lane
    x_held = tl.load(x + offs_held, eviction_policy="evict_first")
    x_fp32 = x_held.to(tl.float32)
    m_i = tl.maximum(tl.max(x_fp32, 0), LOWEST)
    l_i = tl.sum(exp(x_fp32 - m_i[None, :], PRECISE), 0)
    for start in tl.range(HELD, N, STEP, num_stages=NUM_STAGES):
        part = tl.load(x + start + offs, mask=offs < N - start, other=float("-inf")).to(tl.float32)
        m_new = tl.maximum(m_i, tl.max(part, 0))
        l_i = l_i * exp(m_i - m_new, PRECISE) + tl.sum(exp(part - m_new[None, :], PRECISE), 0)
        m_i = m_new
    # Combine the lanes
    row_max = tl.max(m_i, 0)
    scale = row_scale(tl.sum(l_i * exp(m_i - row_max, PRECISE), 0), LOG)

    # Second pass, backwards: scale and store
    last = HELD + (tl.cdiv(N - HELD, STEP) - 1) * STEP
    for back in tl.range(0, N - HELD, STEP, num_stages=NUM_STAGES):
        start = last - back
        mask = offs < N - start
        part = tl.load(x + start + offs, mask=mask, eviction_policy="evict_first").to(tl.float32)
        y_fp32 = scaled(part, row_max, scale, PRECISE, LOG)
        tl.store(y + start + offs, y_fp32.to(y.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    y_fp32 = scaled(opaque_fp32(x_held, PACKED), row_max, scale, PRECISE, LOG)
    tl.store(y + offs_held, y_fp32.to(y.dtype.element_ty), eviction_policy="evict_first")


@triton.jit
def softmax_part_kernel(maxima, sums, x, N, parts, stride_x, BLOCK_N: tl.constexpr):  # maxima, sums: (M, parts)
    """Maximum and sum of exponentials of one part of a row."""
    PRECISE: tl.constexpr = x.dtype.element_ty == tl.float32
    row_idx, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    col_offsets = part * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.load(x + row_idx.to(tl.int64) * stride_x + col_offsets, mask=col_offsets < N, other=float("-inf"))
    x_fp32 = row.to(tl.float32)
    m_i = tl.maximum(tl.max(x_fp32, 0), LOWEST)
    tl.store(maxima + tl.program_id(0), m_i)
    tl.store(sums + tl.program_id(0), tl.sum(exp(x_fp32 - m_i, PRECISE), 0))


@triton.jit
def softmax_scale_kernel(
    y, maxima, sums, x, N, parts, stride_x,  # maxima, sums: (M, parts)
    PARTS: tl.constexpr, BLOCK_N: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """y of one part of a row, from maxima and sums of all its parts."""
    # Load the part
    PRECISE: tl.constexpr = x.dtype.element_ty == tl.float32
    row_idx, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    col_offsets = part * BLOCK_N + tl.arange(0, BLOCK_N)
    x_fp32 = tl.load(x + row_idx.to(tl.int64) * stride_x + col_offsets, mask=col_offsets < N).to(tl.float32)
    # Combine maxima and sums of the parts
    offs_p = tl.arange(0, PARTS)
    m_i = tl.load(maxima + row_idx * parts + offs_p, mask=offs_p < parts, other=LOWEST)
    l_i = tl.load(sums + row_idx * parts + offs_p, mask=offs_p < parts, other=0.0)
    row_max = tl.max(m_i, 0)
    scale = row_scale(tl.sum(l_i * exp(m_i - row_max, PRECISE), 0), LOG)
    # Scale and store
    y_fp32 = scaled(x_fp32, row_max, scale, PRECISE, LOG)
    tl.store(y + row_idx.to(tl.int64) * N + col_offsets, y_fp32.to(y.dtype.element_ty), mask=col_offsets < N)


@triton.jit
def softmax_backward_kernel(
    dx, dy, y, M, N, stride_dy, stride_y,  # dx, dy, y: (M, N)
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """dx = y * (dy - dot(dy, y)), the dot product over each row; LOG: dx = dy - exp(y) * sum(dy); the short form."""
    PRECISE: tl.constexpr = y.dtype.element_ty == tl.float32
    # Load the rows
    col_offsets = tl.arange(0, BLOCK_N)[None, :]
    row_idx = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = col_offsets < N
    if ROWS > 1:  # with one row a program no row is out of range, and the mask takes one register less
        mask = mask & (row_idx < M)
    row_offsets = row_idx.to(tl.int64)
    y_row = tl.load(y + row_offsets * stride_y + col_offsets, mask=mask, other=0.0)
    dy_row = tl.load(dy + row_offsets * stride_dy + col_offsets, mask=mask, other=0.0)
    # Compute and store dx
    dot = tl.sum(weighted(dy_row.to(tl.float32), y_row.to(tl.float32), LOG), 1)[:, None]
    dx_fp32 = row_gradient(opaque_fp32(dy_row, PACKED), opaque_fp32(y_row, PACKED), dot, PRECISE, LOG)
    tl.store(dx + row_offsets * N + col_offsets, dx_fp32.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def softmax_backward_long_kernel(
    dx, dy, y, N, stride_dy, stride_y,  # dx, dy, y: (M, N), N > HELD
    HELD: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr, NUM_STAGES: tl.constexpr, PACKED: tl.constexpr,
    LOG: tl.constexpr,
):  # fmt: skip
    """dx as above, the long form."""
    PRECISE: tl.constexpr = y.dtype.element_ty == tl.float32
    STEP: tl.constexpr = STEPS * LANES
    lanes = tl.arange(0, LANES)[None, :]
    offs_held = tl.arange(0, HELD // LANES)[:, None] * LANES + lanes
    offs = tl.arange(0, STEPS)[:, None] * LANES + lanes
    dy += tl.program_id(0).to(tl.int64) * stride_dy
    y += tl.program_id(0).to(tl.int64) * stride_y
    dx += tl.program_id(0).to(tl.int64) * N

    # First pass: the dot product
    y_held = tl.load(y + offs_held, eviction_policy="evict_first")
    dy_held = tl.load(dy + offs_held, eviction_policy="evict_first")
    dots = tl.sum(weighted(dy_held.to(tl.float32), y_held.to(tl.float32), LOG), 0)
    for start in tl.range(HELD, N, STEP, num_stages=NUM_STAGES):
        mask = offs < N - start
        y_fp32 = tl.load(y + start + offs, mask=mask, other=0.0).to(tl.float32)
        dy_fp32 = tl.load(dy + start + offs, mask=mask, other=0.0).to(tl.float32)
        dots += tl.sum(weighted(dy_fp32, y_fp32, LOG), 0)
    dot = tl.sum(dots, 0)

    # Second pass, backwards: dx
    last = HELD + (tl.cdiv(N - HELD, STEP) - 1) * STEP
    for back in tl.range(0, N - HELD, STEP, num_stages=NUM_STAGES):
        start = last - back
        mask = offs < N - start
        y_fp32 = tl.load(y + start + offs, mask=mask, eviction_policy="evict_first").to(tl.float32)
        dy_fp32 = tl.load(dy + start + offs, mask=mask, eviction_policy="evict_first").to(tl.float32)
        dx_ptrs = dx + start + offs
        dx_fp32 = row_gradient(dy_fp32, y_fp32, dot, PRECISE, LOG)
        tl.store(dx_ptrs, dx_fp32.to(dx.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    dx_fp32 = row_gradient(opaque_fp32(dy_held, PACKED), opaque_fp32(y_held, PACKED), dot, PRECISE, LOG)
    tl.store(dx + offs_held, dx_fp32.to(dx.dtype.element_ty), eviction_policy="evict_first")
