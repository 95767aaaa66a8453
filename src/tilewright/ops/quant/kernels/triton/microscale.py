"""The arithmetic of `microscale.py` in Triton, and the two kernels of its casts: a program takes several whole blocks.

x is contiguous and blocks divide its rows, so a kernel sees one line of blocks.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from tilewright.ops.quant import microscale
from tilewright.ops.quant.kernels.triton.numbers import decode, encode

INFINITY = tl.constexpr(0x7F800000)
INVERSE_6 = tl.constexpr(microscale.INVERSE_6)


@triton.jit
def power(exponent):
    """2^(exponent - 127) of int32 0 to 255."""
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def encode_e2m1(x):
    """e2m1 codes of float32 x, int32."""
    bits = x.to(tl.int32, bitcast=True)
    v = tl.abs(x)
    code = (v > 0.25).to(tl.int32) + (v >= 0.75).to(tl.int32) + (v > 1.25).to(tl.int32) + (v >= 1.75).to(tl.int32)
    code += (v > 2.5).to(tl.int32) + (v >= 3.5).to(tl.int32) + (v > 5.0).to(tl.int32)
    return code | ((bits >> 28) & 8)


@triton.jit
def decode_e2m1(codes):
    """float32 numbers of e2m1 codes, int32 0 to 15."""
    rest = codes & 7
    twice = tl.where(rest < 2, rest, ((rest & 1) | 2) << (tl.maximum(rest >> 1, 1) - 1))
    value = (twice.to(tl.float32) * 0.5).to(tl.int32, bitcast=True) | ((codes & 8) << 28)
    return value.to(tl.float32, bitcast=True)


@triton.jit
def cast_kernel(
    q, scales, x, tensor_scale, blocks,  # q: e4m3 or bytes   scales: bytes or e4m3   x: (blocks, BLOCK)
    EMAX: tl.constexpr, BITS: tl.constexpr, POWERS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Computes the scale of each block, and its elements."""
    offs_b = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask_b = offs_b < blocks
    offs = offs_b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(x + offs, mask=mask_b[:, None], other=0.0).to(tl.float32)
    amax = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = amax < INFINITY

    # Compute the scale
    if POWERS:
        exponent = tl.maximum((amax >> 23) - EMAX, 0)
        tl.store(scales + offs_b, tl.where(finite, exponent, 255).to(tl.uint8), mask=mask_b)
        inverse = power(254 - tl.minimum(exponent, 254))
    else:
        t = tl.load(tensor_scale)
        target = amax.to(tl.float32, bitcast=True) * (tl.div_rn(1.0, t) * INVERSE_6)
        target = tl.where(finite & (target == target), tl.where(target > 448.0, 448.0, target), float("nan"))
        stored = encode(target, scales)
        tl.store(scales + offs_b, stored, mask=mask_b)
        scale = decode(stored) * t
        inverse = tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale)))

    # Round the elements
    inverse = tl.where(finite, inverse, 0.0)
    scaled = tl.where(finite[:, None], values * inverse[:, None], 0.0)
    scaled = tl.where(scaled == scaled, scaled, 0.0)  # the scale of the tensor is no number
    if BITS == 8:
        clamped = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
        tl.store(q + offs, encode(clamped, q), mask=mask_b[:, None])
    else:
        low, high = tl.split(tl.reshape(encode_e2m1(scaled), (ROWS, BLOCK // 2, 2)))
        offs_q = offs_b[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        tl.store(q + offs_q, (low | (high << 4)).to(tl.uint8), mask=mask_b[:, None])


@triton.jit
def restore_kernel(
    y, q, scales, tensor_scale, blocks,  # y: (blocks, BLOCK)
    BITS: tl.constexpr, POWERS: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Computes y = element * scale of its block, * that of the tensor with WHOLE."""
    offs_b = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask_b = offs_b < blocks
    offs = offs_b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if BITS == 8:
        values = decode(tl.load(q + offs, mask=mask_b[:, None]))
    else:
        offs_q = offs_b[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        both = tl.load(q + offs_q, mask=mask_b[:, None], other=0).to(tl.int32)
        values = tl.reshape(tl.join(decode_e2m1(both & 15), decode_e2m1(both >> 4)), (ROWS, BLOCK))
    stored = tl.load(scales + offs_b, mask=mask_b)
    if POWERS:
        scale = power(stored.to(tl.int32))
    else:
        scale = decode(stored)
    values = values * scale[:, None]
    if WHOLE:
        values = values * tl.load(tensor_scale)
    tl.store(y + offs, values.to(y.dtype.element_ty), mask=mask_b[:, None])
