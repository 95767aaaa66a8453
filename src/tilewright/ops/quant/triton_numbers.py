"""The arithmetic of `numbers.py` in Triton, bit for bit: what quantising kernels of every op share.

A maximum is taken of magnitudes as integers, which order as the numbers do, NaN above infinity: so a NaN wins, which
Triton's maximum of numbers would lose.  GPUs without a conversion to e4m3 of their own (before sm_89; gfx942, which has
another e4m3) make it of integers: their kernels see q as bytes, see `as_stored`.
"""

import re

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.triton_launch import target_of
from tilewright.ops.quant import numbers

INFINITY = tl.constexpr(0x7F800000)
AMAX_MIN = tl.constexpr(int(torch.tensor(numbers.AMAX_MIN).view(torch.int32)))  # as a magnitude
INVERSE_MAX = tl.constexpr(numbers.INVERSE_MAX)
MANTISSA = tl.constexpr(0x7FFFFF)


def as_stored(q: Tensor) -> Tensor:
    """`q` as kernels on its device take it: e4m3, or bytes where the GPU has no such type."""
    return q.view(torch.uint8) if re.fullmatch(r"sm_8[0-8]|sm_[1-7]\d|gfx(?!950|12).*", target_of(q)) else q


def speaks_ptx(q: Tensor) -> bool:
    """Are kernels on q, as `as_stored` gave it, compiled to PTX that converts to e4m3?"""
    return q.dtype != torch.uint8 and target_of(q).startswith("sm_")


def compares_pairs(t: Tensor) -> bool:
    """Has the device of `t` an instruction for two 16-bit maxima?  From Hopper on."""
    return re.fullmatch(r"sm_(9\d|1\d\d)a?", target_of(t)) is not None


@triton.jit
def magnitude(x):
    """|x| as an integer that orders as the number does."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def packed(x):
    """x (M, N) for keeping: 16-bit numbers as words of two neighbours (M, N / 2) int32, first lowest; wider as it is.

    Neighbours come from memory in one register, and as a word they stay there until `unpacked`: a kernel that needs all
    maxima before it can go on holds twice as much.
    """
    if x.dtype.primitive_bitwidth == 16:
        low, high = tl.split(tl.reshape(x.to(tl.int16, bitcast=True), (x.shape[0], x.shape[1] // 2, 2)))
        result = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    else:
        result = x
    return result


@triton.jit
def packed_magnitudes(kept):
    """`magnitude` of what `packed` made: of wide numbers 32 bits, of pairs two of 16 in a word."""
    if kept.dtype == tl.int32:
        result = kept & 0x7FFF7FFF
    else:
        result = magnitude(kept)
    return result


@triton.jit
def larger_pair(a, b):
    """Both maxima of two words of magnitudes."""
    return tl.maximum(a & 0xFFFF, b & 0xFFFF) | (tl.maximum(a, b) & -65536)


@triton.jit
def larger_pair_native(a, b):
    """The same in one instruction."""
    return tl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def halves(words, DTYPE: tl.constexpr):
    """The two numbers of DTYPE in each word, in float32."""
    if DTYPE.is_bf16():  # as words: as halves of one, ptxas takes it apart and puts it together again
        low, high = (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    else:
        low = (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def larger_size(a, b, PAIRS: tl.constexpr, NATIVE: tl.constexpr):
    """The larger of two `packed_magnitudes`, element by element."""
    if not PAIRS:
        sizes = tl.maximum(a, b)
    elif NATIVE:
        sizes = larger_pair_native(a, b)
    else:
        sizes = larger_pair(a, b)
    return sizes


@triton.jit
def largest_size(sizes, AXIS: tl.constexpr, PAIRS: tl.constexpr, NATIVE: tl.constexpr):
    """The largest of `packed_magnitudes` along AXIS, None for all."""
    if not PAIRS:
        found = tl.max(sizes, AXIS)
    elif NATIVE:
        found = tl.reduce(sizes, AXIS, larger_pair_native)
    else:
        found = tl.reduce(sizes, AXIS, larger_pair)
    return found


@triton.jit
def size_amax(sizes, AXIS: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Largest `magnitude` along AXIS, 1 or None for all, of numbers of DTYPE with these `packed_magnitudes`."""
    PAIRS: tl.constexpr = DTYPE.primitive_bitwidth == 16
    found = largest_size(sizes, AXIS, PAIRS, NATIVE)
    if PAIRS:
        low, high = halves(found, DTYPE)
        amax = tl.maximum(magnitude(low), magnitude(high))
    else:
        amax = found
    return amax


@triton.jit
def unpacked_halves(kept, factor, DTYPE: tl.constexpr):
    """Even and odd columns, each (M, N / 2) float32, of what `packed` made of numbers of DTYPE, times `factor`."""
    if kept.dtype == tl.int32:
        low, high = halves(kept, DTYPE)
    else:
        low, high = tl.split(tl.reshape(kept.to(tl.float32), (kept.shape[0], kept.shape[1] // 2, 2)))
    return low * factor, high * factor


@triton.jit
def unpacked(kept, even, odd, DTYPE: tl.constexpr):
    """float32 (M, N) of what `packed` made of numbers of DTYPE, even columns times `even`, odd ones times `odd`."""
    if kept.dtype == tl.int32:
        low, high = halves(kept, DTYPE)
        result = tl.reshape(tl.join(low * even, high * odd), (kept.shape[0], 2 * kept.shape[1]))
    else:
        result = kept.to(tl.float32) * even
    return result


@triton.jit
def scale_of(amax, UE8M0: tl.constexpr):
    """float32 scale of blocks with these largest magnitudes."""
    scale = tl.maximum(amax, AMAX_MIN).to(tl.float32, bitcast=True) * INVERSE_MAX
    if UE8M0:
        bits = scale.to(tl.int32, bitcast=True)
        scale = tl.where(bits < INFINITY, (bits + MANTISSA) & ~MANTISSA, bits).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def exponent(scale):
    """UE8M0 of a power of two: its biased exponent, 255 for NaN and Inf."""
    return (scale.to(tl.int32, bitcast=True) >> 23) & 255


@triton.jit
def inverse(scale):
    """1 / scale, correctly rounded: multiply by it, then `encode`."""
    return tl.div_rn(1.0, scale)


@triton.jit
def inverse_native(scale):
    """`inverse` of a scale, which is normal or infinite or NaN, without a branch for what it cannot be."""
    guess = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip
    return tl.where(scale == float("inf"), 0.0, tl.fma(guess, tl.fma(-scale, guess, 1.0), guess))


@triton.jit
def encode(x, q):
    """float32 as e4m3, to nearest even, for a store through pointer `q`: bytes if that is one to bytes."""
    if q.dtype.element_ty == tl.uint8:
        bits = x.to(tl.int32, bitcast=True)
        size = tl.minimum(bits & 0x7FFFFFFF, INFINITY)
        # 20 bits of the mantissa go; the exponent's bias changes from 127 to 7; above 464 it is NaN, as in torch
        normal = tl.minimum(((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3), 0x7F)
        # below 2^-6 e4m3 has steps of 2^-9, those of float32 from 2^14 on
        steps = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
        code = tl.where(size < 0x3C800000, steps, normal)
        result = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        result = x.to(tl.float8e4nv)
    return result


@triton.jit
def encode_four(a, b, c, d, q, PTX: tl.constexpr):
    """`encode` of four numbers into one int32, a lowest."""
    if PTX:  # two at a time, where they shall be; Triton's own conversion pairs neighbours of one tensor
        word = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        word = _byte(a, q) | (_byte(b, q) << 8) | (_byte(c, q) << 16) | (_byte(d, q) << 24)
    return word


@triton.jit
def _byte(x, q):
    return encode(x, q).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def decode(q):
    """float32 of e4m3 values, or of bytes that are such."""
    if q.dtype == tl.uint8:
        code = q.to(tl.int32)
        # e4m3's fields lie in float16 with the same width and one more bit of exponent: a bias 8 larger
        half = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
        result = tl.where((code & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    else:
        result = q.to(tl.float32)
    return result
