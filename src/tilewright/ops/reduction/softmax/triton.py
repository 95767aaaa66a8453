"""Softmax in Triton, in three forms that differ in where a row is while its maximum and sum are found.

short   A row fits in registers: one read, one write.
long    One program a row keeps the first `held` elements in registers and walks over the rest twice: forwards with a
        running maximum and sum in every lane, no barrier; then backwards, so that what was read last is still near, in
        L1, or in L2, which on an H200 (60 MB) has room for 132 rows of 256 KB.  Second reads and stores are evicted
        first.
split   Few long rows, as in decoding: many programs a row leave maximum and sum of their part, a second launch scales.

Traffic: forward 4*M*N bytes at bf16, so 4096x128256 cannot beat 500 us at 4.2 TB/s; backward reads dy and y and writes
dx, 6*M*N, 750 us.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.exponential import exp
from tilewright.ops.rows import as_rows

LOWEST = tl.constexpr(-3.4028234663852886e38)  # the first maximum; -inf - -inf would be NaN
REGISTERS = 32768  # elements a program keeps as float32: 64 registers a thread at 16 warps
SPLIT_ROWS = 64  # from here on, one program a row fills half of an H200


class Config(NamedTuple):
    held: int  # elements of a row in registers, a power of two; longer rows take the long form
    num_warps: int
    rows: int = 1  # short: of one program
    num_stages: int = 1  # long: of the walk along a row
    steps: int = 2  # long: 16-byte vectors per thread in one step along the row
    split: int = 0  # elements a program takes of a row that is divided among programs; 0: it is not
    packed: bool = False  # short, long: 16-bit elements stay packed in registers between their uses (NVIDIA)


def _short(n: int, held: int) -> Config:
    block = triton.next_power_of_2(n)
    return Config(held, num_warps=min(16, max(4, block // 1024)), rows=max(1, min(32, 2048 // block)))


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    m, n = bucket
    if n <= REGISTERS:
        return _short(n, REGISTERS)
    if m > SPLIT_ROWS:
        return Config(REGISTERS // 2, num_warps=16, steps=4)  # holding all REGISTERS spills on sm_100
    return Config(REGISTERS, num_warps=4, split=1024 if m <= 2 else 4096)


def configure_backward(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    _, n = bucket
    held = REGISTERS // 2  # of dy and of y
    return _short(n, held) if n <= held else Config(held, num_warps=16)


_WIDTHS = tuple(1 << k for k in range(17))
CONFIGS = tuple(dict.fromkeys(configure((m, n), torch.bfloat16) for n in _WIDTHS for m in (1, 8, 4096)))
BACKWARD_CONFIGS = tuple(dict.fromkeys(configure_backward((4096, n), torch.bfloat16) for n in _WIDTHS))

_PARTS = ((512, 2), (512, 4), (1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8), (8192, 16))
_SPLIT = tuple(Config(REGISTERS, warps, split=n) for n, warps in _PARTS)


def _forms(dtype: torch.dtype) -> tuple[bool, ...]:
    return (False, True) if dtype.itemsize == 2 and torch.version.hip is None else (False,)


def _short_space(n: int, held: int, dtype: torch.dtype) -> tuple[Config, ...]:
    """4 to 64 elements a thread; packed ones take half the registers, so that a second program fits beside."""
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
    """8 to 64 elements of a row in each thread, and one to four vectors more a step."""
    return tuple(
        Config(elements, warps, steps=steps, packed=packed)
        for packed in _forms(dtype)
        for elements in held
        for warps in (8, 16, 32)
        for steps in (1, 2, 4)
        if (32 if packed else 8) <= elements // (32 * warps) <= 64 and steps * warps <= 64
    )


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    m, n = bucket
    short = _short_space(n, REGISTERS, dtype) if n <= REGISTERS else ()
    long = _long_space((8192, 16384, 32768, 65536), dtype) if n > REGISTERS // 2 and m >= SPLIT_ROWS else ()
    split = _SPLIT if n > REGISTERS and m <= 2 * SPLIT_ROWS else ()
    return (*short, *(c for c in long if c.held < n), *split)


def candidates_backward(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    _, n = bucket
    held = REGISTERS // 2
    # 32 warps hold twice as much, where the GPU takes programs of 1024 threads
    short = _short_space(n, max(held, triton.next_power_of_2(n)), dtype) if n <= REGISTERS else ()
    long = _long_space((8192, 16384, 32768), dtype) if n > held else ()
    return (*short, *(c for c in long if c.held < n))


@triton.jit
def _again(x, PACKED: tl.constexpr):
    """x, for its second use.  PACKED: as something the compiler knows nothing of; else it would keep the float32 of the
    first use in twice the registers.
    """
    if PACKED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x.to(tl.float32)


@triton.jit
def _softmax_kernel(
    y, x, M, N, stride_x,  # x, y: (M, N)
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    PRECISE: tl.constexpr = y.dtype.element_ty == tl.float32
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    offs_m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = offs_n < N
    if ROWS > 1:  # else there is a program for each row, and one register less to keep
        mask = mask & (offs_m < M)
    at = offs_m.to(tl.int64)
    row = tl.load(x + at * stride_x + offs_n, mask=mask, other=float("-inf"))
    wide = row.to(tl.float32)
    top = tl.maximum(tl.max(wide, 1), LOWEST)
    e = exp(wide - top[:, None], PRECISE)
    scale = tl.div_rn(1.0, tl.sum(e, 1))
    if PACKED:
        e = exp(_again(row, PACKED) - top[:, None], PRECISE)
    result = e * scale[:, None]
    tl.store(y + at * N + offs_n, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_long_kernel(
    y, x, N, stride_x,  # x, y: (M, N), N > HELD
    HELD: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr, NUM_STAGES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    PRECISE: tl.constexpr = y.dtype.element_ty == tl.float32
    # Lanes lie across the program's threads, so maxima and sums over dimension 0 need no other thread.
    STEP: tl.constexpr = STEPS * LANES
    lanes = tl.arange(0, LANES)[None, :]
    offs_held = tl.arange(0, HELD // LANES)[:, None] * LANES + lanes
    offs = tl.arange(0, STEPS)[:, None] * LANES + lanes
    x += tl.program_id(0).to(tl.int64) * stride_x
    y += tl.program_id(0).to(tl.int64) * N

    held = tl.load(x + offs_held, eviction_policy="evict_first")
    wide = held.to(tl.float32)
    top = tl.maximum(tl.max(wide, 0), LOWEST)
    total = tl.sum(exp(wide - top[None, :], PRECISE), 0)
    for start in tl.range(HELD, N, STEP, num_stages=NUM_STAGES):
        part = tl.load(x + start + offs, mask=offs < N - start, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(part, 0))
        total = total * exp(top - higher, PRECISE) + tl.sum(exp(part - higher[None, :], PRECISE), 0)
        top = higher
    highest = tl.max(top, 0)
    scale = tl.div_rn(1.0, tl.sum(total * exp(top - highest, PRECISE), 0))

    last = HELD + (tl.cdiv(N - HELD, STEP) - 1) * STEP
    for back in tl.range(0, N - HELD, STEP, num_stages=NUM_STAGES):
        start = last - back
        mask = offs < N - start
        part = tl.load(x + start + offs, mask=mask, eviction_policy="evict_first").to(tl.float32)
        result = exp(part - highest, PRECISE) * scale
        tl.store(y + start + offs, result.to(y.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    result = exp(_again(held, PACKED) - highest, PRECISE) * scale
    tl.store(y + offs_held, result.to(y.dtype.element_ty), eviction_policy="evict_first")


@triton.jit
def _softmax_part_kernel(tops, totals, x, N, parts, stride_x, BLOCK_N: tl.constexpr):  # tops, totals: (M, parts)
    PRECISE: tl.constexpr = x.dtype.element_ty == tl.float32
    row, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    offs_n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    values = tl.load(x + row.to(tl.int64) * stride_x + offs_n, mask=offs_n < N, other=float("-inf")).to(tl.float32)
    top = tl.maximum(tl.max(values, 0), LOWEST)
    tl.store(tops + tl.program_id(0), top)
    tl.store(totals + tl.program_id(0), tl.sum(exp(values - top, PRECISE), 0))


@triton.jit
def _softmax_scale_kernel(
    y, tops, totals, x, N, parts, stride_x,  # tops, totals: (M, parts)
    PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    PRECISE: tl.constexpr = x.dtype.element_ty == tl.float32
    row, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    offs_n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    values = tl.load(x + row.to(tl.int64) * stride_x + offs_n, mask=offs_n < N).to(tl.float32)
    offs_p = tl.arange(0, PARTS)
    top = tl.load(tops + row * parts + offs_p, mask=offs_p < parts, other=LOWEST)
    total = tl.load(totals + row * parts + offs_p, mask=offs_p < parts, other=0.0)
    highest = tl.max(top, 0)
    scale = tl.div_rn(1.0, tl.sum(total * exp(top - highest, PRECISE), 0))
    result = exp(values - highest, PRECISE) * scale
    tl.store(y + row.to(tl.int64) * N + offs_n, result.to(y.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _softmax_backward_kernel(
    dx, dy, y, M, N, stride_dy, stride_y,  # dx, dy, y: (M, N)
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    offs_m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = offs_n < N
    if ROWS > 1:  # else there is a program for each row, and one register less to keep
        mask = mask & (offs_m < M)
    at = offs_m.to(tl.int64)
    p = tl.load(y + at * stride_y + offs_n, mask=mask, other=0.0)
    g = tl.load(dy + at * stride_dy + offs_n, mask=mask, other=0.0)
    mean = tl.sum(g.to(tl.float32) * p.to(tl.float32), 1)[:, None]
    result = _again(p, PACKED) * (_again(g, PACKED) - mean)
    tl.store(dx + at * N + offs_n, result.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_backward_long_kernel(
    dx, dy, y, N, stride_dy, stride_y,  # dx, dy, y: (M, N), N > HELD
    HELD: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr, NUM_STAGES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = STEPS * LANES
    lanes = tl.arange(0, LANES)[None, :]
    offs_held = tl.arange(0, HELD // LANES)[:, None] * LANES + lanes
    offs = tl.arange(0, STEPS)[:, None] * LANES + lanes
    dy += tl.program_id(0).to(tl.int64) * stride_dy
    y += tl.program_id(0).to(tl.int64) * stride_y
    dx += tl.program_id(0).to(tl.int64) * N

    held_p = tl.load(y + offs_held, eviction_policy="evict_first")
    held_g = tl.load(dy + offs_held, eviction_policy="evict_first")
    products = tl.sum(held_p.to(tl.float32) * held_g.to(tl.float32), 0)
    for start in tl.range(HELD, N, STEP, num_stages=NUM_STAGES):
        mask = offs < N - start
        p = tl.load(y + start + offs, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy + start + offs, mask=mask, other=0.0).to(tl.float32)
        products += tl.sum(p * g, 0)
    mean = tl.sum(products, 0)  # of dy under the distribution y

    last = HELD + (tl.cdiv(N - HELD, STEP) - 1) * STEP
    for back in tl.range(0, N - HELD, STEP, num_stages=NUM_STAGES):
        start = last - back
        mask = offs < N - start
        p = tl.load(y + start + offs, mask=mask, eviction_policy="evict_first").to(tl.float32)
        g = tl.load(dy + start + offs, mask=mask, eviction_policy="evict_first").to(tl.float32)
        tl.store(dx + start + offs, (p * (g - mean)).to(dx.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    result = _again(held_p, PACKED) * (_again(held_g, PACKED) - mean)
    tl.store(dx + offs_held, result.to(dx.dtype.element_ty), eviction_policy="evict_first")


_short_forward = TritonKernel(_softmax_kernel)
_long_forward = TritonKernel(_softmax_long_kernel)
_part = TritonKernel(_softmax_part_kernel)
_scale = TritonKernel(_softmax_scale_kernel)
_short_backward = TritonKernel(_softmax_backward_kernel)
_long_backward = TritonKernel(_softmax_backward_long_kernel)


def _lanes(config: Config, dtype: torch.dtype) -> int:
    """One 16-byte vector for each thread of a program."""
    return config.num_warps * 32 * 16 // dtype.itemsize


@register_impl(
    "softmax", backend="triton", configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates
)
def launch(outs: tuple[Tensor], x: Tensor, *, config: Config) -> None:
    x = as_rows(x)
    m, n = x.shape
    block = triton.next_power_of_2(n)
    if block <= config.held:
        constants = (config.rows, block, config.packed)
        grid = (triton.cdiv(m, config.rows),)
        _short_forward(grid, (outs[0], x, m, n, x.stride(0)), constants, num_warps=config.num_warps)
    elif config.split:
        parts = -(-n // config.split)
        tops, totals = (scratch((m, parts), torch.float32, x.device) for _ in range(2))
        _part((m * parts,), (tops, totals, x, n, parts, x.stride(0)), (config.split,), num_warps=config.num_warps)
        args = (outs[0], tops, totals, x, n, parts, x.stride(0))
        constants = (triton.next_power_of_2(parts), config.split)
        _scale((m * parts,), args, constants, num_warps=config.num_warps)
    else:
        constants = (config.held, config.steps, _lanes(config, x.dtype), config.num_stages, config.packed)
        _long_forward((m,), (outs[0], x, n, x.stride(0)), constants, num_warps=config.num_warps)


@register_impl(
    "softmax",
    backend="triton",
    direction="bwd",
    configure=configure_backward,
    config_type=Config,
    configs=BACKWARD_CONFIGS,
    candidates=candidates_backward,
)
def launch_backward(outs: tuple[Tensor], dy: Tensor, y: Tensor, *, config: Config) -> None:
    dy, y = as_rows(dy), as_rows(y)
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
