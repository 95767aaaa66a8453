"""RMSNorm to e4m3 in Triton: the rows of `rms_norm/triton.py`, quantised in registers.

A program holds whole rows; 16 lanes hold a group of 128 at 16 bytes of x each, so that its maximum takes three or four
shuffles.  Rows too long for registers are read twice; the second read comes from L2.
Many rows of whole parts go another way, see `triton_parts.py`.
Traffic: reads x, writes q and 4 bytes a group, 3.03*M*N bytes at bf16: 8192x4096 cannot beat 24 us at 4.2 TB/s.  A norm
and a cast of its result move 7.03*M*N.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.norm.rms_norm.triton import (
    MAX_BLOCK,
    every,
    normalise_block,
    normalise_rows,
    rstd_of_row,
)
from tilewright.ops.norm.rms_norm.triton import candidates as candidates_plain
from tilewright.ops.norm.rms_norm.triton import configure as configure_plain
from tilewright.ops.norm.rms_norm_fp8.triton_parts import parts
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.quant.triton_numbers import (
    as_stored,
    compares_pairs,
    encode,
    inverse,
    inverse_native,
    packed,
    packed_magnitudes,
    scale_of,
    size_amax,
    unpacked,
)
from tilewright.ops.rows import as_rows

GROUP = TOKEN.depth


class Config(NamedTuple):
    rows: int  # of one program
    num_warps: int
    columns: int = 0  # of one part, where a row is taken in parts: 8 or 16 a thread


def configure_whole(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """For rows that are not taken in parts."""
    m, n = bucket
    block = min(triton.next_power_of_2(n), MAX_BLOCK)
    if m >= 1024 and block >= 2048:
        # Instructions bound it: 14.5 an element on sm_90 where a thread has 64, 19 where it has 16.  H200, 2026-11:
        # 8192x4096 (2, 4) 27.8 us, (1, 8) 30.1; 8192x7168 (1, 8) 51.7, (1, 4) 53.6; 4096x14336 (1, 8) 57.4, (1, 16) 63
        return Config(8192 // block, num_warps=4) if block <= 4096 else Config(rows=1, num_warps=8)
    return Config(*configure_plain(bucket, dtype))


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    m, n = bucket
    if m >= 1024 and 2048 <= n <= MAX_BLOCK and dtype.itemsize == 2:
        # 16 neighbours a thread: half the shuffles and reciprocals an element.  Up to 64 elements a thread take 10.3
        # instructions each and 80 registers, up to 128 take 9.6 and 141: an SM has more than 80 KB on their way
        warps = triton.next_power_of_2(triton.cdiv(n, 2048))
        for fewer in (warps, warps // 2):
            if fewer > 0 and n % (512 * fewer) == 0:
                return Config(1, fewer, 512 * fewer)
    return configure_whole(bucket, dtype)


def candidates_whole(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    return tuple(Config(*config) for config in candidates_plain(bucket, dtype))


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Whole rows, and parts of 16 to 128 elements a thread."""
    _, n = bucket
    found = (
        Config(1, warps, columns)
        for warps in (1, 2, 4, 8, 16)
        for columns in (256 * warps, 512 * warps)
        if n % columns == 0 and 16 <= n // (32 * warps) <= 128 and dtype.itemsize == 2
    )
    return *candidates_whole(bucket, dtype), *found


@triton.jit
def _quantise(result, q, x, UE8M0: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """(codes (ROWS, BLOCK_N), scales (ROWS, groups)) of float32 results, rounded to x's dtype first."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    GROUPS: tl.constexpr = BLOCK_N // 128
    kept = packed(result.to(DTYPE).reshape(ROWS * GROUPS, 128))
    scale = scale_of(size_amax(packed_magnitudes(kept), 1, DTYPE, NATIVE), UE8M0)
    if NATIVE:
        factor = inverse_native(scale)[:, None]
    else:
        factor = inverse(scale)[:, None]
    codes = encode(unpacked(kept, factor, factor, DTYPE), q)
    return codes.reshape(ROWS, BLOCK_N), scale.reshape(ROWS, GROUPS)


# A row of q is `units` * UNIT long, and nothing says that `units` is even: so a thread stores as many elements as it
# loads in 16 bytes, and the layout of a row, with it the order of its sum, is that of the plain norm.
@triton.jit(do_not_specialize=["units"])
def _rms_norm_fp8_kernel(
    q, scales, total, x, residual, weight,  # q, total, x, residual: (R, N), R = batch * M   scales: (batch, M, groups)
    R, N, M, stride_x, stride_r, units, pitch, step, eps, offset,
    ADD: tl.constexpr, FP32_WEIGHT: tl.constexpr, UE8M0: tl.constexpr, BATCHED: tl.constexpr, NATIVE: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    result, at, offs_n, mask = normalise_rows(
        total, x, residual, weight, R, N, stride_x, stride_r, eps, offset, ADD, FP32_WEIGHT, ROWS, BLOCK_N
    )
    codes, scale = _quantise(result, q, x, UE8M0, NATIVE, ROWS, BLOCK_N)
    tl.store(q + at * (units * UNIT) + offs_n[None, :], codes, mask=mask)
    line = tl.arange(0, BLOCK_N // 128)[None, :]
    keep = (at < R) & (line * 128 < N)
    if BATCHED:
        at = at // M * step + at % M
    tl.store(scales + line.to(tl.int64) * pitch + at, scale, mask=keep)


@triton.jit(do_not_specialize=["units"])
def _rms_norm_fp8_long_kernel(
    q, scales, total, x, residual, weight,  # as above
    N, M, stride_x, stride_r, units, pitch, step, eps, offset,
    ADD: tl.constexpr, FP32_WEIGHT: tl.constexpr, UE8M0: tl.constexpr, BATCHED: tl.constexpr, NATIVE: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = row
    if BATCHED:
        at = row // M * step + row % M
    rstd = rstd_of_row(x, residual, row, N, stride_x, stride_r, eps, ADD, BLOCK_N)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        result = normalise_block(
            total, x, residual, weight, row, rstd, offs_n, N, stride_x, stride_r, offset, ADD, FP32_WEIGHT
        )
        codes, scale = _quantise(result, q, x, UE8M0, NATIVE, 1, BLOCK_N)
        tl.store(q + row * (units * UNIT) + offs_n, codes.reshape(BLOCK_N), mask=offs_n < N)
        line = start // 128 + tl.arange(0, BLOCK_N // 128)
        tl.store(scales + line.to(tl.int64) * pitch + at, scale.reshape(BLOCK_N // 128), mask=line * 128 < N)


_short = TritonKernel(_rms_norm_fp8_kernel)
_long = TritonKernel(_rms_norm_fp8_long_kernel)


class Options(NamedTuple):
    """Of a norm and of its scales."""

    eps: float
    offset: float
    fp32_weight: bool
    ue8m0: bool


def run(
    q: Tensor,
    scales: Tensor,
    total: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    options: Options,
    config: Config,
) -> None:
    """Normalise and quantise x, or with `residual` the sum, which is left in `total`."""
    rows, weight = as_rows(x), weight.contiguous()
    other = None if residual is None else as_rows(residual)
    r, n = rows.shape
    m, batched = x.shape[-2], r > x.shape[-2]
    block = max(GROUP, triton.next_power_of_2(n))
    unit = 16 // x.element_size() if n % 16 == 0 else 1
    strides = (rows.stride(0), 0 if other is None else other.stride(0), n // unit)
    places = (scales.stride(-1), scales.stride(-3) if batched else 0)
    if config.columns and n % config.columns == 0 and other is None and x.element_size() == 2:
        count = n // config.columns
        args = (as_stored(q), scales, rows, weight, n, m, rows.stride(0), *places, *options[:2])
        constants = (options.fp32_weight, options.ue8m0, batched, compares_pairs(q))
        shape = (count, (count - 1).bit_length(), config.columns)
        parts((r,), args, (*constants, *shape), num_warps=config.num_warps)
        return
    tensors = (as_stored(q), scales, total, rows, other, weight)
    constants = (other is not None, options.fp32_weight, options.ue8m0, batched, compares_pairs(q), unit)
    if block > MAX_BLOCK:
        _long((r,), (*tensors, n, m, *strides, *places, *options[:2]), (*constants, 4096), num_warps=8)
        return
    grid = (triton.cdiv(r, config.rows),)
    args = (*tensors, r, n, m, *strides, *places, *options[:2])
    _short(grid, args, (*constants, config.rows, block), num_warps=config.num_warps)


@register_impl(
    "rms_norm_fp8",
    backend="triton",
    configure=configure,
    config_type=Config,
    configs=every(configure),
    candidates=candidates,
)
def launch(
    outs: tuple[Tensor, Tensor],
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    fp32_weight: bool,
    ue8m0: bool,
    *,
    config: Config,
) -> None:
    run(*outs, None, x, None, weight, Options(eps, offset, fp32_weight, ue8m0), config)
