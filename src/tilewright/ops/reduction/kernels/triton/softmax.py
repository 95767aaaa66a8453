"""Softmax in Triton, in three forms that differ in where a row is kept while its maximum and sum are computed.

short   A row fits in registers: one read, one write.
long    One program a row keeps the first `held` elements in registers and reads the rest twice: forwards with a running
        maximum and sum in every lane, without a barrier; then backwards, so that the elements read last are still in
        L1, or in L2, which on an H200 (60 MB) has room for 132 rows of 256 KB.  Second reads and stores are evicted
        first.
split   Few long rows, as in decoding: many programs a row write maximum and sum of their part, a second launch scales.

Traffic: forward 4*M*N bytes at bf16, so 4096x128256 cannot beat 500 us at 4.2 TB/s; backward reads dy and y and writes
dx, 6*M*N, 750 us.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.exponential import exp
from tilewright.ops.reduction.kernels.triton.packed_rows import LOWEST, opaque_fp32
from tilewright.ops.reduction.softmax import BACKWARD, FORWARD, SoftmaxArgs, SoftmaxBackwardArgs
from tilewright.ops.rows import RowsBucket, as_rows

REGISTERS = 32768  # float32 elements that a program holds: 64 registers a thread at 16 warps
SPLIT_ROWS = 64  # from here on, one program a row fills half of an H200


class Config(NamedTuple):
    held: int  # elements of a row in registers, a power of two; longer rows take the long form
    num_warps: int
    rows: int = 1  # short: rows per program
    num_stages: int = 1  # long: of the loop over a row
    steps: int = 2  # long: 16-byte vectors per thread in one step of the loop
    split: int = 0  # elements per program of a row that several programs share; 0: one program a row
    packed: bool = False  # short, long: 16-bit elements stay packed in registers between uses (NVIDIA)


def _short(n: int, held: int) -> Config:
    block = triton.next_power_of_2(n)
    return Config(held, num_warps=min(16, max(4, block // 1024)), rows=max(1, min(32, 2048 // block)))


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    m, n = bucket
    if n <= REGISTERS:
        return _short(n, REGISTERS)
    if m > SPLIT_ROWS:
        return Config(REGISTERS // 2, num_warps=16, steps=4)  # holding all REGISTERS spills on sm_100
    return Config(REGISTERS, num_warps=4, split=1024 if m <= 2 else 4096)


def configure_backward(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    _, n = bucket
    held = REGISTERS // 2  # elements of dy and as many of y
    return _short(n, held) if n <= held else Config(held, num_warps=16)


_WIDTHS = tuple(1 << k for k in range(17))
CONFIGS = tuple(dict.fromkeys(configure(RowsBucket(m, n), torch.bfloat16) for n in _WIDTHS for m in (1, 8, 4096)))
BACKWARD_CONFIGS = tuple(dict.fromkeys(configure_backward(RowsBucket(4096, n), torch.bfloat16) for n in _WIDTHS))

_PARTS = ((512, 2), (512, 4), (1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8), (8192, 16))
_SPLIT = tuple(Config(REGISTERS, warps, split=n) for n, warps in _PARTS)


def _forms(dtype: torch.dtype) -> tuple[bool, ...]:
    return (False, True) if dtype.itemsize == 2 and torch.version.hip is None else (False,)


def _short_space(n: int, held: int, dtype: torch.dtype) -> tuple[Config, ...]:
    """4 to 64 elements a thread; packed ones take half the registers, so that two programs fit on an SM."""
    block = triton.next_power_of_2(n)
    return tuple(
        Config(held, warps, rows, packed=packed)
        for packed in _forms(dtype)
        for warps in (1, 2, 4, 8, 16, 32)
        for rows in (1, 2, 4, 8, 16, 32)
        if rows * block <= max(held, 2048)
        and (16 if packed else 4 if block <= 256 else 8) <= rows * block // (32 * warps) <= 64
        and (rows == 1 or block <= 4096)
    )


def _long_space(held: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """8 to 64 held elements a thread, and one to four vectors a step."""
    return tuple(
        Config(elements, warps, steps=steps, packed=packed)
        for packed in _forms(dtype)
        for elements in held
        for warps in (8, 16, 32)
        for steps in (1, 2, 4)
        if (32 if packed else 8) <= elements // (32 * warps) <= 64 and steps * warps <= 64
    )


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    m, n = bucket
    short = _short_space(n, REGISTERS, dtype) if n <= REGISTERS else ()
    long = _long_space((8192, 16384, 32768, 65536), dtype) if n > REGISTERS // 2 and m >= SPLIT_ROWS else ()
    split = _SPLIT if n > REGISTERS and m <= 2 * SPLIT_ROWS else ()
    return (*short, *(c for c in long if c.held < n), *split)


def candidates_backward(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    _, n = bucket
    held = REGISTERS // 2
    # 32 warps hold twice as much, where the GPU takes programs of 1024 threads
    short = _short_space(n, max(held, triton.next_power_of_2(n)), dtype) if n <= REGISTERS else ()
    long = _long_space((8192, 16384, 32768), dtype) if n > held else ()
    return (*short, *(c for c in long if c.held < n))


@triton.jit
def _softmax_kernel(
    y, x, M, N, stride_x,  # x, y: (M, N)
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr,
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
    scale = tl.div_rn(1.0, tl.sum(e, 1))
    # Scale and store
    if PACKED:
        e = exp(opaque_fp32(row, PACKED) - m_i[:, None], PRECISE)
    y_fp32 = e * scale[:, None]
    tl.store(y + row_offsets * N + col_offsets, y_fp32.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_long_kernel(
    y, x, N, stride_x,  # x, y: (M, N), N > HELD
    HELD: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr, NUM_STAGES: tl.constexpr, PACKED: tl.constexpr,
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
    scale = tl.div_rn(1.0, tl.sum(l_i * exp(m_i - row_max, PRECISE), 0))

    # Second pass, backwards: scale and store
    last = HELD + (tl.cdiv(N - HELD, STEP) - 1) * STEP
    for back in tl.range(0, N - HELD, STEP, num_stages=NUM_STAGES):
        start = last - back
        mask = offs < N - start
        part = tl.load(x + start + offs, mask=mask, eviction_policy="evict_first").to(tl.float32)
        y_fp32 = exp(part - row_max, PRECISE) * scale
        tl.store(y + start + offs, y_fp32.to(y.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    y_fp32 = exp(opaque_fp32(x_held, PACKED) - row_max, PRECISE) * scale
    tl.store(y + offs_held, y_fp32.to(y.dtype.element_ty), eviction_policy="evict_first")


@triton.jit
def _softmax_part_kernel(maxima, sums, x, N, parts, stride_x, BLOCK_N: tl.constexpr):  # maxima, sums: (M, parts)
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
def _softmax_scale_kernel(
    y, maxima, sums, x, N, parts, stride_x,  # maxima, sums: (M, parts)
    PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
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
    scale = tl.div_rn(1.0, tl.sum(l_i * exp(m_i - row_max, PRECISE), 0))
    # Scale and store
    y_fp32 = exp(x_fp32 - row_max, PRECISE) * scale
    tl.store(y + row_idx.to(tl.int64) * N + col_offsets, y_fp32.to(y.dtype.element_ty), mask=col_offsets < N)


@triton.jit
def _softmax_backward_kernel(
    dx, dy, y, M, N, stride_dy, stride_y,  # dx, dy, y: (M, N)
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dx = y * (dy - dot(dy, y)), the dot product over each row; the short form."""
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
    dot = tl.sum(dy_row.to(tl.float32) * y_row.to(tl.float32), 1)[:, None]
    dx_fp32 = opaque_fp32(y_row, PACKED) * (opaque_fp32(dy_row, PACKED) - dot)
    tl.store(dx + row_offsets * N + col_offsets, dx_fp32.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_backward_long_kernel(
    dx, dy, y, N, stride_dy, stride_y,  # dx, dy, y: (M, N), N > HELD
    HELD: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr, NUM_STAGES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dx as above, the long form."""
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
    dots = tl.sum(y_held.to(tl.float32) * dy_held.to(tl.float32), 0)
    for start in tl.range(HELD, N, STEP, num_stages=NUM_STAGES):
        mask = offs < N - start
        y_fp32 = tl.load(y + start + offs, mask=mask, other=0.0).to(tl.float32)
        dy_fp32 = tl.load(dy + start + offs, mask=mask, other=0.0).to(tl.float32)
        dots += tl.sum(y_fp32 * dy_fp32, 0)
    dot = tl.sum(dots, 0)

    # Second pass, backwards: dx
    last = HELD + (tl.cdiv(N - HELD, STEP) - 1) * STEP
    for back in tl.range(0, N - HELD, STEP, num_stages=NUM_STAGES):
        start = last - back
        mask = offs < N - start
        y_fp32 = tl.load(y + start + offs, mask=mask, eviction_policy="evict_first").to(tl.float32)
        dy_fp32 = tl.load(dy + start + offs, mask=mask, eviction_policy="evict_first").to(tl.float32)
        dx_ptrs = dx + start + offs
        dx_fp32 = y_fp32 * (dy_fp32 - dot)
        tl.store(dx_ptrs, dx_fp32.to(dx.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    dx_fp32 = opaque_fp32(y_held, PACKED) * (opaque_fp32(dy_held, PACKED) - dot)
    tl.store(dx + offs_held, dx_fp32.to(dx.dtype.element_ty), eviction_policy="evict_first")


_short_forward = TritonKernel(_softmax_kernel)
_long_forward = TritonKernel(_softmax_long_kernel)
_part = TritonKernel(_softmax_part_kernel)
_scale = TritonKernel(_softmax_scale_kernel)
_short_backward = TritonKernel(_softmax_backward_kernel)
_long_backward = TritonKernel(_softmax_backward_long_kernel)


def _lanes(config: Config, dtype: torch.dtype) -> int:
    """One 16-byte vector for each thread of a program."""
    return config.num_warps * 32 * 16 // dtype.itemsize


@register_kernel(FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates)
def launch(outs: tuple[Tensor], args: SoftmaxArgs, config: Config) -> None:
    x = as_rows(args.x)
    m, n = x.shape
    block = triton.next_power_of_2(n)
    if block <= config.held:
        constants = (config.rows, block, config.packed)
        grid = (triton.cdiv(m, config.rows),)
        _short_forward(grid, (outs[0], x, m, n, x.stride(0)), constants, num_warps=config.num_warps)
    elif config.split:
        parts = -(-n // config.split)
        maxima, sums = (scratch((m, parts), torch.float32, x.device) for _ in range(2))
        _part((m * parts,), (maxima, sums, x, n, parts, x.stride(0)), (config.split,), num_warps=config.num_warps)
        parameters = (outs[0], maxima, sums, x, n, parts, x.stride(0))
        constants = (triton.next_power_of_2(parts), config.split)
        _scale((m * parts,), parameters, constants, num_warps=config.num_warps)
    else:
        constants = (config.held, config.steps, _lanes(config, x.dtype), config.num_stages, config.packed)
        _long_forward((m,), (outs[0], x, n, x.stride(0)), constants, num_warps=config.num_warps)


@register_kernel(
    BACKWARD,
    configure=configure_backward,
    config_type=Config,
    configs=BACKWARD_CONFIGS,
    candidates=candidates_backward,
)
def launch_backward(outs: tuple[Tensor], args: SoftmaxBackwardArgs, config: Config) -> None:
    dy, y = as_rows(args.dy), as_rows(args.y)
    m, n = y.shape
    block = triton.next_power_of_2(n)
    strides = (dy.stride(0), y.stride(0))
    if block <= config.held:
        constants = (config.rows, block, config.packed)
        grid = (triton.cdiv(m, config.rows),)
        _short_backward(grid, (outs[0], dy, y, m, n, *strides), constants, num_warps=config.num_warps)
    else:
        constants = (config.held, config.steps, _lanes(config, y.dtype), config.num_stages, config.packed)
        _long_backward((m,), (outs[0], dy, y, n, *strides), constants, num_warps=config.num_warps)
