"""Softmax of rows that begin at any element, such as those of a vocabulary of 50257, in Triton: forms of `softmax.py`.

A row is divided into head, body and tail as `ops/unaligned_rows.py` says; the body is what the plain kernels take for
the row, and head and tail join its maximum and sums.  Where in a row the sums of a thread begin depends on the address
of the row, so the bits of a row depend on its place in the batch.
Traffic as there: 4*M*N bytes forward at bf16, so 2000x50257 cannot beat 96 us at 4.2 TB/s; backward 6*M*N, 144 us.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel, target_of
from tilewright.ops.exponential import exp
from tilewright.ops.reduction.kernels.triton import softmax as plain
from tilewright.ops.reduction.kernels.triton.packed_rows import LOWEST, opaque_fp32
from tilewright.ops.reduction.softmax import BACKWARD, FORWARD, SoftmaxArgs, SoftmaxBackwardArgs
from tilewright.ops.rows import RowsBucket, as_rows
from tilewright.ops.unaligned_rows import (
    body_of,
    edge_columns,
    lengths,
    odd_length,
    row_max,
    row_sum,
    rows_and_columns,
    unaligned,
)


class UnalignedConfig(NamedTuple):
    """Fields as in `softmax.Config`.   packed: on NVIDIA alone."""

    held: int
    num_warps: int
    rows: int = 1
    num_stages: int = 1
    steps: int = 2
    split: int = 0
    packed: bool = False


_ONE_WAVE = 256  # rows, one or two for each multiprocessor
WHOLE = 2 * plain.REGISTERS  # elements of 16 bits that 16 warps hold packed, 64 registers a thread


def configure(bucket: RowsBucket, dtype: torch.dtype) -> UnalignedConfig | None:
    m, n = bucket
    if not odd_length(n, dtype):
        return None
    if n > plain.REGISTERS and m > plain.SPLIT_ROWS and dtype.itemsize == 2:
        # Two passes over parts of a row keep more programs on a multiprocessor: 77.6 us at 2000 x 32776 and 130.9 at
        # 2000 x 50257, 114.6 and 129.7 with the whole row held.  Of few rows each takes as long as its two passes: 8 x
        # 50257 takes 7.9 us held and 12.5 in parts (H200, 2026-11)
        if m > _ONE_WAVE:
            return UnalignedConfig(plain.REGISTERS // 4, num_warps=8, packed=True)
        if n <= WHOLE:
            return UnalignedConfig(WHOLE, num_warps=16, packed=True)
    return UnalignedConfig(*plain.configure(bucket, dtype))


def configure_backward(bucket: RowsBucket, dtype: torch.dtype) -> UnalignedConfig | None:
    if not odd_length(bucket.N, dtype):
        return None
    config = UnalignedConfig(*plain.configure_backward(bucket, dtype))
    if config.held < bucket.N and dtype.itemsize == 2:  # as above
        return config._replace(held=2 * config.held, packed=True)
    return config


_LENGTHS = tuple((1 << k) + 1 for k in range(9, 17))
CONFIGS = tuple(
    dict.fromkeys(
        config
        for n in _LENGTHS
        for m in (1, 8, 128, 4096)
        if (config := configure(RowsBucket(m, n), torch.bfloat16)) is not None
    )
)
BACKWARD_CONFIGS = tuple(
    dict.fromkeys(
        config for n in _LENGTHS if (config := configure_backward(RowsBucket(4096, n), torch.bfloat16)) is not None
    )
)


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[UnalignedConfig, ...]:
    """Those of the plain kernel, and whole rows held packed."""
    m, n = bucket
    if not odd_length(n, dtype):
        return ()
    warps = (16, 32) if dtype.itemsize == 2 and plain.REGISTERS < n <= WHOLE and m >= plain.SPLIT_ROWS else ()
    whole_rows = (UnalignedConfig(WHOLE, num_warps, packed=True) for num_warps in warps)
    return *whole_rows, *(UnalignedConfig(*config) for config in plain.candidates(bucket, dtype))


def candidates_backward(bucket: RowsBucket, dtype: torch.dtype) -> tuple[UnalignedConfig, ...]:
    if not odd_length(bucket.N, dtype):
        return ()
    return tuple(UnalignedConfig(*config) for config in plain.candidates_backward(bucket, dtype))


@triton.jit
def _softmax_unaligned_kernel(
    y, x, M, N, stride_x,  # x, y: (M, N)
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr,
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
    scale = tl.div_rn(1.0, row_sum(e, ROWS) + row_sum(e_edge, ROWS))
    # Scale and store
    if PACKED:
        e = exp(opaque_fp32(x_body, PACKED) - m_i, PRECISE)
    tl.store(y + body_of(y_start, VECTOR) + offs, (e * scale).to(y.dtype.element_ty), mask=mask)
    tl.store(y + y_start + edge_offs, (e_edge * scale).to(y.dtype.element_ty), mask=edge_mask)


@triton.jit
def _softmax_unaligned_long_kernel(
    y, x, N, stride_x,  # x, y: (M, N), N > HELD
    HELD: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr, NUM_STAGES: tl.constexpr, PACKED: tl.constexpr,
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
    e_edge = exp(x_edge - largest, PRECISE)
    scale = tl.div_rn(1.0, tl.sum(l_i * exp(m_i - largest, PRECISE), 0) + tl.sum(e_edge, 0))
    tl.store(y + y_start + edge_offs, (e_edge * scale).to(y.dtype.element_ty), mask=edge_mask)

    # Second pass, backwards: scale and store
    last = HELD + (tl.cdiv(body - HELD, STEP) - 1) * STEP
    for back in tl.range(0, body - HELD, STEP, num_stages=NUM_STAGES):
        start = last - back
        mask = offs < body - start
        part = tl.load(x_ptr + start + offs, mask=mask, eviction_policy="evict_first").to(tl.float32)
        y_fp32 = exp(part - largest, PRECISE) * scale
        tl.store(y_ptr + start + offs, y_fp32.to(y.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    y_fp32 = exp(opaque_fp32(x_held, PACKED) - largest, PRECISE) * scale
    tl.store(y_ptr + offs_held, y_fp32.to(y.dtype.element_ty), mask=held_mask, eviction_policy="evict_first")


@triton.jit
def _softmax_unaligned_part_kernel(maxima, sums, x, N, parts, stride_x, BLOCK_N: tl.constexpr):
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
def _softmax_unaligned_scale_kernel(
    y, maxima, sums, x, N, parts, stride_x,  # maxima, sums: (M, parts)
    PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
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
    scale = tl.div_rn(1.0, tl.sum(l_i * exp(m_i - largest, PRECISE), 0))
    # Scale and store
    y_fp32, y_edge = exp(x_fp32 - largest, PRECISE) * scale, exp(x_edge - largest, PRECISE) * scale
    tl.store(y + body_of(y_start, VECTOR) + offs, y_fp32.to(y.dtype.element_ty), mask=offs < body)
    tl.store(y + y_start + edge_offs, y_edge.to(y.dtype.element_ty), mask=edge_mask)


@triton.jit
def _softmax_unaligned_backward_kernel(
    dx, dy, y, M, N, stride_dy, stride_y,  # dx, dy, y: (M, N)
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dx = y * (dy - dot(dy, y)), the dot product over each row; the short form."""
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
    dot = row_sum(dy_body.to(tl.float32) * y_body.to(tl.float32), ROWS) + row_sum(dy_edge * y_edge, ROWS)
    dx_fp32 = opaque_fp32(y_body, PACKED) * (opaque_fp32(dy_body, PACKED) - dot)
    tl.store(dx + body_of(dx_start, VECTOR) + offs, dx_fp32.to(dx.dtype.element_ty), mask=mask)
    tl.store(dx + dx_start + edge_offs, (y_edge * (dy_edge - dot)).to(dx.dtype.element_ty), mask=edge_mask)


@triton.jit
def _softmax_unaligned_backward_long_kernel(
    dx, dy, y, N, stride_dy, stride_y,  # dx, dy, y: (M, N), N > HELD
    HELD: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr, NUM_STAGES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dx as above, the long form.  The body may be shorter than HELD."""
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
    dots = tl.sum(y_held.to(tl.float32) * dy_held.to(tl.float32), 0)
    for start in tl.range(HELD, body, STEP, num_stages=NUM_STAGES):
        mask = offs < body - start
        y_fp32 = tl.load(y_ptr + start + offs, mask=mask, other=0.0).to(tl.float32)
        dy_fp32 = tl.load(dy_ptr + start + offs, mask=mask, other=0.0).to(tl.float32)
        dots += tl.sum(y_fp32 * dy_fp32, 0)
    dot = tl.sum(dots, 0) + tl.sum(y_edge * dy_edge, 0)
    tl.store(dx + dx_start + edge_offs, (y_edge * (dy_edge - dot)).to(dx.dtype.element_ty), mask=edge_mask)

    # Second pass, backwards: dx
    last = HELD + (tl.cdiv(body - HELD, STEP) - 1) * STEP
    for back in tl.range(0, body - HELD, STEP, num_stages=NUM_STAGES):
        start = last - back
        mask = offs < body - start
        y_fp32 = tl.load(y_ptr + start + offs, mask=mask, eviction_policy="evict_first").to(tl.float32)
        dy_fp32 = tl.load(dy_ptr + start + offs, mask=mask, eviction_policy="evict_first").to(tl.float32)
        dx_fp32 = y_fp32 * (dy_fp32 - dot)
        tl.store(dx_ptr + start + offs, dx_fp32.to(dx.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    dx_fp32 = opaque_fp32(y_held, PACKED) * (opaque_fp32(dy_held, PACKED) - dot)
    tl.store(dx_ptr + offs_held, dx_fp32.to(dx.dtype.element_ty), mask=held_mask, eviction_policy="evict_first")


_short_forward = TritonKernel(_softmax_unaligned_kernel)
_long_forward = TritonKernel(_softmax_unaligned_long_kernel)
_part = TritonKernel(_softmax_unaligned_part_kernel)
_scale = TritonKernel(_softmax_unaligned_scale_kernel)
_short_backward = TritonKernel(_softmax_unaligned_backward_kernel)
_long_backward = TritonKernel(_softmax_unaligned_backward_long_kernel)


def _lanes(config: UnalignedConfig, dtype: torch.dtype) -> int:
    """One 16-byte vector for each thread of a program."""
    return config.num_warps * 32 * 16 // dtype.itemsize


def _packed(config: UnalignedConfig, x: Tensor) -> bool:
    return config.packed and x.itemsize == 2 and target_of(x).startswith("sm_")


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=UnalignedConfig,
    configs=CONFIGS,
    candidates=candidates,
    batch_invariant=False,
)
def launch(outs: tuple[Tensor], args: SoftmaxArgs, config: UnalignedConfig) -> None:
    x, y = as_rows(args.x), as_rows(outs[0])
    m, n = x.shape
    packed = _packed(config, x)
    if not unaligned(x, y):
        plain.launch(outs, args, plain.Config(*config)._replace(packed=packed))
        return
    block = triton.next_power_of_2(n)
    if block <= config.held:
        grid = (triton.cdiv(m, config.rows),)
        parameters = (y, x, m, n, x.stride(0))
        _short_forward(grid, parameters, (config.rows, block, packed), num_warps=config.num_warps)
    elif config.split:
        parts = -(-n // config.split)
        maxima, sums = (scratch((m, parts), torch.float32, x.device) for _ in range(2))
        _part((m * parts,), (maxima, sums, x, n, parts, x.stride(0)), (config.split,), num_warps=config.num_warps)
        parameters = (y, maxima, sums, x, n, parts, x.stride(0))
        constants = (triton.next_power_of_2(parts), config.split)
        _scale((m * parts,), parameters, constants, num_warps=config.num_warps)
    else:
        constants = (config.held, config.steps, _lanes(config, x.dtype), config.num_stages, packed)
        _long_forward((m,), (y, x, n, x.stride(0)), constants, num_warps=config.num_warps)


@register_kernel(
    BACKWARD,
    configure=configure_backward,
    config_type=UnalignedConfig,
    configs=BACKWARD_CONFIGS,
    candidates=candidates_backward,
    batch_invariant=False,
)
def launch_backward(outs: tuple[Tensor], args: SoftmaxBackwardArgs, config: UnalignedConfig) -> None:
    dy, y, dx = as_rows(args.dy), as_rows(args.y), as_rows(outs[0])
    m, n = y.shape
    packed = _packed(config, y)
    if not unaligned(y, dy, dx):
        plain.launch_backward(outs, args, plain.Config(*config)._replace(packed=packed))
        return
    block = triton.next_power_of_2(n)
    strides = (dy.stride(0), y.stride(0))
    if block <= config.held:
        grid = (triton.cdiv(m, config.rows),)
        constants = (config.rows, block, packed)
        _short_backward(grid, (dx, dy, y, m, n, *strides), constants, num_warps=config.num_warps)
    else:
        constants = (config.held, config.steps, _lanes(config, y.dtype), config.num_stages, packed)
        _long_backward((m,), (dx, dy, y, n, *strides), constants, num_warps=config.num_warps)
