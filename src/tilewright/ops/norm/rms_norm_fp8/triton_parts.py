"""RMSNorm to e4m3 of rows that are whole parts of a power of two of columns, such as 7168 = 7 * 1024, in Triton.

A program takes one row.  All parts are on their way at once, none is masked, and until it is stored a row is held as
words of two elements: half the registers, so twice as many rows in flight, and no padding of 7168 columns to 8192.
Each step is taken for all parts before the next one: a chain of shuffles and a reciprocal would else be waited for once
a part.  Only 16-bit dtypes; the sum of squares is in another order than that of the plain norm.
"""

import triton
import triton.language as tl

from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.norm.rms_norm.triton import mean_of
from tilewright.ops.quant.triton_numbers import (
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
    """A part of the result, as words of two: rounded to DTYPE before the weight too, unless that is FP32_WEIGHT."""
    if NATIVE and not FP32_WEIGHT and w.dtype == DTYPE:  # products of pairs, which Triton's would take apart for
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
def _side_by_side(scales, PARTS: tl.constexpr, LEVELS: tl.constexpr):
    """(G, 2^LEVELS) of PARTS tensors (G,), the last one repeated."""
    joined = scales
    for _ in tl.static_range(PARTS, 2**LEVELS):
        joined += (scales[PARTS - 1],)
    for level in tl.static_range(LEVELS):
        shorter = ()
        for i in tl.static_range(2 ** (LEVELS - 1 - level)):
            shorter += (tl.join(joined[i], joined[i + 2 ** (LEVELS - 1 - level)]),)
        joined = shorter
    return tl.reshape(joined[0], (scales[0].shape[0], 2**LEVELS))


@triton.jit
def _rms_norm_fp8_parts_kernel(
    q, scales, x, weight, N, M, stride_x, pitch, step, eps, offset,  # q, x: (R, N)   scales: (batch, M, groups)
    FP32_WEIGHT: tl.constexpr, UE8M0: tl.constexpr, BATCHED: tl.constexpr, NATIVE: tl.constexpr,
    PARTS: tl.constexpr, LEVELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip  # N = PARTS * COLUMNS   LEVELS: log2 of PARTS, rounded up
    DTYPE: tl.constexpr = x.dtype.element_ty
    GROUPS: tl.constexpr = COLUMNS // 128
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    places = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    x += row * stride_x
    kept = ()
    for part in tl.static_range(PARTS):
        kept += (packed(tl.load(x + part * COLUMNS + places)),)  # (GROUPS, 64)
    squares = tl.zeros((GROUPS, 64), tl.float32)
    for part in tl.static_range(PARTS):
        low, high = halves(kept[part], DTYPE)
        squares += low * low
        squares += high * high
    rstd = tl.rsqrt(mean_of(tl.sum(squares), N) + eps)
    results = ()
    for part in tl.static_range(PARTS):
        w = tl.load(weight + part * COLUMNS + places)
        results += (_weighted(kept[part], w, rstd, offset, DTYPE, FP32_WEIGHT, NATIVE),)
    found = ()
    for part in tl.static_range(PARTS):
        found += (scale_of(size_amax(packed_magnitudes(results[part]), 1, DTYPE, NATIVE), UE8M0),)
    q += row * N
    for part in tl.static_range(PARTS):
        if NATIVE:
            factor = inverse_native(found[part])[:, None]
        else:
            factor = inverse(found[part])[:, None]
        tl.store(q + part * COLUMNS + places, encode(unpacked(results[part], factor, factor, DTYPE), q))
    if BATCHED:
        row = row // M * step + row % M
    part = tl.arange(0, 2**LEVELS)[None, :]
    line = part * GROUPS + group[:, None]
    tl.store(scales + line.to(tl.int64) * pitch + row, _side_by_side(found, PARTS, LEVELS), mask=part < PARTS)


parts = TritonKernel(_rms_norm_fp8_parts_kernel)
