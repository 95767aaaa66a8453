"""Sparsemax in Triton: one program a row, tau by Newton's method instead of a sort.

sum(max(x - tau, 0)) - 1 is convex and piecewise linear in tau.  From max(x) - 1, which is never above the root,
Newton's steps tau = (sum of the elements above tau - 1) / (their number) rise to the root and stop where the elements
above tau are those of the step before: tau is then exact but for rounding.  Each step at least halves the function or
its slope; normal and uniform rows of 128256 elements need 1 to 13.
whole   A row fits in registers: one read, one write.
parts   The steps read the row again, from L1 or L2 where it is still there.
Backward: dx = dy - mean(dy) over the elements with y > 0, else 0.

Traffic: forward 4*M*N bytes at bf16, so 4096x32768 cannot beat 128 us at 4.2 TB/s; backward reads dy and y and writes
dx, 6*M*N, 192 us.
Source: Michelot, "A finite algorithm for finding the projection of a point onto the canonical simplex", 1986.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.reduction.sparsemax import BACKWARD, FORWARD, SparsemaxArgs, SparsemaxBackwardArgs
from tilewright.ops.rows import RowsBucket, as_rows, no_float64

WHOLE = 32768  # float32 elements that a program holds: 64 registers a thread at 16 warps
PART = 4096


class Config(NamedTuple):
    block: int  # columns of a tile, a power of two; longer rows are read in parts
    num_warps: int


def _of_columns(n: int, longest: int) -> Config:
    block = max(128, triton.next_power_of_2(n))  # a vector of each thread of a warp
    block = block if block <= longest else PART
    return Config(block, num_warps=max(1, min(16, block // 512)))


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    return _of_columns(bucket.N, WHOLE)


def configure_backward(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    return _of_columns(bucket.N, WHOLE // 2)  # elements of dy and as many of y


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return tuple(
        Config(block, warps)
        for block in (256, 1024, 2048, 4096, 8192, 16384, 32768)
        for warps in (1, 2, 4, 8, 16, 32)
        if block < 2 * max(256, bucket.N) and 4 <= block // (32 * warps) <= 64
    )


_WIDTHS = tuple(1 << k for k in range(17))
CONFIGS = tuple(dict.fromkeys(_of_columns(n, WHOLE) for n in _WIDTHS))
BACKWARD_CONFIGS = tuple(dict.fromkeys(_of_columns(n, WHOLE // 2) for n in _WIDTHS))


@triton.jit
def _load(x, cols, N, other):
    return tl.load(x + cols, mask=cols < N, other=other).to(tl.float32)


@triton.jit
def _above(held, x, row_max, tau, N, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """(sum, number) of the x - row_max above tau in a row; held: all x - row_max, if WHOLE."""
    cols = tl.arange(0, BLOCK)
    if WHOLE:
        is_above = held > tau
        return tl.sum(tl.where(is_above, held, 0.0), 0), tl.sum(is_above.to(tl.int32), 0)
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, N, BLOCK):
        z = _load(x, start + cols, N, float("-inf")) - row_max
        is_above = z > tau
        total += tl.where(is_above, z, 0.0)
        count += is_above.to(tl.int32)
    return tl.sum(total, 0), tl.sum(count, 0)


@triton.jit
def _sparsemax_kernel(y, x, N, stride_x, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """y of a row.  WHOLE: the row is one tile."""
    row = tl.program_id(0).to(tl.int64)
    x += row * stride_x
    y += row * N
    cols = tl.arange(0, BLOCK)
    # The maximum, and whether the row has a NaN, which maxima leave out
    held = _load(x, cols, N, float("-inf"))
    m_i, is_nan = held, held != held
    if not WHOLE:
        for start in tl.range(BLOCK, N, BLOCK):
            part = _load(x, start + cols, N, float("-inf"))
            m_i = tl.maximum(m_i, part)
            is_nan = is_nan | (part != part)
    row_max = tl.max(m_i, 0)
    has_nan = (tl.max(is_nan.to(tl.int32), 0) > 0) | (tl.abs(row_max) == float("inf"))
    row_max = tl.where(has_nan, 0.0, row_max)
    poison = tl.where(has_nan, float("nan"), 0.0)
    # Newton's steps, of x - row_max
    held = held - row_max
    tau, last = -1.0, N + 1
    total, count = _above(held, x, row_max, tau, N, BLOCK, WHOLE)
    while (count < last) & (poison == 0.0):
        tau = tl.maximum(tau, tl.div_rn(total - 1.0, count.to(tl.float32)))
        last = count
        total, count = _above(held, x, row_max, tau, N, BLOCK, WHOLE)
    # Subtract and store
    if WHOLE:
        tl.store(y + cols, (tl.maximum(held - tau, 0.0) + poison).to(y.dtype.element_ty), mask=cols < N)
    else:
        for start in tl.range(0, N, BLOCK):
            z = _load(x, start + cols, N, float("-inf")) - row_max
            y_fp32 = tl.maximum(z - tau, 0.0) + poison
            tl.store(y + start + cols, y_fp32.to(y.dtype.element_ty), mask=start + cols < N)


@triton.jit
def _gradient(dy, y, mean):
    """The gradient of some elements; NaN stays NaN."""
    return tl.where(y != y, y, tl.where(y > 0.0, dy - mean, 0.0))


@triton.jit
def _sparsemax_backward_kernel(dx, dy, y, N, stride_dy, stride_y, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """dx of a row.  WHOLE: the row is one tile."""
    row = tl.program_id(0).to(tl.int64)
    dx += row * N
    dy += row * stride_dy
    y += row * stride_y
    cols = tl.arange(0, BLOCK)
    y_fp32, dy_fp32 = _load(y, cols, N, 0.0), _load(dy, cols, N, 0.0)
    total = tl.where(y_fp32 > 0.0, dy_fp32, 0.0)
    count = (y_fp32 > 0.0).to(tl.int32)
    if not WHOLE:
        for start in tl.range(BLOCK, N, BLOCK):
            support = _load(y, start + cols, N, 0.0) > 0.0
            total += tl.where(support, _load(dy, start + cols, N, 0.0), 0.0)
            count += support.to(tl.int32)
    mean = tl.div_rn(tl.sum(total, 0), tl.maximum(tl.sum(count, 0), 1).to(tl.float32))
    if WHOLE:
        tl.store(dx + cols, _gradient(dy_fp32, y_fp32, mean).to(dx.dtype.element_ty), mask=cols < N)
    else:
        for start in tl.range(0, N, BLOCK):
            part = _gradient(_load(dy, start + cols, N, 0.0), _load(y, start + cols, N, 0.0), mean)
            tl.store(dx + start + cols, part.to(dx.dtype.element_ty), mask=start + cols < N)


_forward = TritonKernel(_sparsemax_kernel)
_backward = TritonKernel(_sparsemax_backward_kernel)


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=lambda args: no_float64(args.x),
)
def launch(outs: tuple[Tensor], args: SparsemaxArgs, config: Config) -> None:
    x = as_rows(args.x)
    m, n = x.shape
    _forward((m,), (outs[0], x, n, x.stride(0)), (config.block, n <= config.block), num_warps=config.num_warps)


@register_kernel(
    BACKWARD,
    configure=configure_backward,
    config_type=Config,
    configs=BACKWARD_CONFIGS,
    candidates=candidates,
    why_not=lambda args: no_float64(args.dy, args.y),
)
def launch_backward(outs: tuple[Tensor], args: SparsemaxBackwardArgs, config: Config) -> None:
    dy, y = as_rows(args.dy), as_rows(args.y)
    m, n = y.shape
    parameters = (outs[0], dy, y, n, dy.stride(0), y.stride(0))
    _backward((m,), parameters, (config.block, n <= config.block), num_warps=config.num_warps)
