"""RMSNorm to e4m3 of rows that are whole parts of a power of two of columns, such as 7168 = 7 * 1024, in Triton.

A program takes one row.  The loads of all parts are in flight at once and none is masked.  The row stays packed, two
elements a word, until it is stored: half the registers, so twice as many rows in flight, and 7168 columns are not
padded to 8192.  Each step runs for all parts before the next step begins, so that the latency of a chain of shuffles
and of a reciprocal is paid once, not once a part.  Only 16-bit dtypes; the sum of squares has another order than in
`rms_norm`.
"""

import triton
import triton.language as tl

from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.norm.kernels.triton.column_sums import mean_of
from tilewright.ops.quant.kernels.triton.numbers import (
    encode,
    halves,
    inverse,
    inverse_native,
    packed,
    packed_magnitudes,
    scale_of,
    size_amax,
    unpacked,
)


@triton.jit
def _weighted(words, w, rstd, offset, DTYPE: tl.constexpr, FP32_WEIGHT: tl.constexpr, NATIVE: tl.constexpr):
    """A part of y as packed words; x * rstd is rounded to DTYPE before the weight too, unless FP32_WEIGHT."""
    if NATIVE and not FP32_WEIGHT and w.dtype == DTYPE:  # packed multiply; Triton would unpack the pairs
        low, high = halves(words, DTYPE)
        PTX: tl.constexpr = "bf16x2" if DTYPE.is_bf16() else "f16x2"
        result = tl.inline_asm_elementwise(
            "{.reg .b32 pair; cvt.rn." + PTX + ".f32 pair, $2, $1; mul.rn." + PTX + " $0, pair, $3;}",
            "=r,r,r,r", [low * rstd, high * rstd, packed(w)], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        normed = unpacked(words, rstd, rstd, DTYPE)
        if FP32_WEIGHT:
            normed = normed * (offset + w.to(tl.float32))
        else:
            normed = normed.to(DTYPE).to(tl.float32) * w.to(tl.float32)
        result = packed(normed.to(DTYPE))
    return result


@triton.jit
def _concatenate(scales, PARTS: tl.constexpr, LEVELS: tl.constexpr):
    """Concatenate PARTS tensors (G,) to (G, 2^LEVELS); the last one is repeated."""
    level_tensors = scales
    for _ in tl.static_range(PARTS, 2**LEVELS):
        level_tensors += (scales[PARTS - 1],)
    for level in tl.static_range(LEVELS):
        next_level = ()
        for i in tl.static_range(2 ** (LEVELS - 1 - level)):
            next_level += (tl.join(level_tensors[i], level_tensors[i + 2 ** (LEVELS - 1 - level)]),)
        level_tensors = next_level
    return tl.reshape(level_tensors[0], (scales[0].shape[0], 2**LEVELS))


@triton.jit
def _rms_norm_fp8_parts_kernel(
    q, scales, x, weight, N, M, stride_x, pitch, step, eps, offset,  # q, x: (R, N)   scales: (batch, M, groups)
    FP32_WEIGHT: tl.constexpr, UE8M0: tl.constexpr, BATCHED: tl.constexpr, NATIVE: tl.constexpr,
    PARTS: tl.constexpr, LEVELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip  # N = PARTS * COLUMNS   LEVELS: log2 of PARTS, rounded up
    DTYPE: tl.constexpr = x.dtype.element_ty
    GROUPS: tl.constexpr = COLUMNS // 128
    row_idx = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    part_offsets = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    x += row_idx * stride_x
    # Load all parts
    x_parts = ()
    for part in tl.static_range(PARTS):
        x_parts += (packed(tl.load(x + part * COLUMNS + part_offsets)),)  # (GROUPS, 64)
    # rstd
    sum_squares = tl.zeros((GROUPS, 64), tl.float32)
    for part in tl.static_range(PARTS):
        low, high = halves(x_parts[part], DTYPE)
        sum_squares += low * low
        sum_squares += high * high
    rstd = tl.rsqrt(mean_of(tl.sum(sum_squares), N) + eps)
    # Normalise and scale
    y_parts = ()
    for part in tl.static_range(PARTS):
        w = tl.load(weight + part * COLUMNS + part_offsets)
        y_parts += (_weighted(x_parts[part], w, rstd, offset, DTYPE, FP32_WEIGHT, NATIVE),)
    # Scales of the groups
    part_scales = ()
    for part in tl.static_range(PARTS):
        part_scales += (scale_of(size_amax(packed_magnitudes(y_parts[part]), 1, DTYPE, NATIVE), UE8M0),)
    # Quantise and store
    q += row_idx * N
    for part in tl.static_range(PARTS):
        if NATIVE:
            factor = inverse_native(part_scales[part])[:, None]
        else:
            factor = inverse(part_scales[part])[:, None]
        tl.store(q + part * COLUMNS + part_offsets, encode(unpacked(y_parts[part], factor, factor, DTYPE), q))
    if BATCHED:
        row_idx = row_idx // M * step + row_idx % M
    part = tl.arange(0, 2**LEVELS)[None, :]
    group_idx = part * GROUPS + group[:, None]
    scale_offsets = group_idx.to(tl.int64) * pitch + row_idx
    tl.store(scales + scale_offsets, _concatenate(part_scales, PARTS, LEVELS), mask=part < PARTS)


parts = TritonKernel(_rms_norm_fp8_parts_kernel)
