"""The arithmetic of `numbers.py` in Triton, bit for bit, shared by the quantising kernels of every op.

A maximum compares magnitudes as integers, which have the order of the numbers, with NaN above infinity: so a NaN wins,
which Triton's maximum of floats would lose.  GPUs that cannot convert to e4m3 (before sm_89; gfx942, which has another
e4m3) compute the bits with integers: their kernels take q as bytes, see `as_stored`.
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
    """`q` as kernels on its device take it: e4m3, or bytes if the GPU does not have the type."""
    return q.view(torch.uint8) if re.fullmatch(r"sm_8[0-8]|sm_[1-7]\d|gfx(?!950|12).*", target_of(q)) else q


def has_ptx_e4m3(q: Tensor) -> bool:
    """True if kernels on q, a result of `as_stored`, compile to PTX that converts to e4m3."""
    return q.dtype != torch.uint8 and target_of(q).startswith("sm_")


def compares_pairs(t: Tensor) -> bool:
    """True if the device of `t` has an instruction for two 16-bit maxima: Hopper and later."""
    return re.fullmatch(r"sm_(9\d|1\d\d)a?", target_of(t)) is not None


@triton.jit
def magnitude(x):
    """|x| as an integer that orders as the number does."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def packed(x):
    """Pack 16-bit x (M, N) into words of two adjacent elements (M, N / 2) int32, first lowest; a wider x stays.

    Adjacent elements are loaded into one register and stay packed until `unpacked`: a kernel that needs all maxima
    before it can quantise holds twice as many elements.
    """
    if x.dtype.primitive_bitwidth == 16:
        low, high = tl.split(tl.reshape(x.to(tl.int16, bitcast=True), (x.shape[0], x.shape[1] // 2, 2)))
        result = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    else:
        result = x
    return result


@triton.jit
def packed_magnitudes(words):
    """`magnitude` of a result of `packed`: two 16-bit magnitudes a word, or one of 32 bits for a wider dtype."""
    if words.dtype == tl.int32:
        result = words & 0x7FFF7FFF
    else:
        result = magnitude(words)
    return result


@triton.jit
def larger_pair(a, b):
    """The larger low half and the larger high half of two words of magnitudes."""
    return tl.maximum(a & 0xFFFF, b & 0xFFFF) | (tl.maximum(a, b) & -65536)


@triton.jit
def larger_pair_native(a, b):
    """`larger_pair` in one instruction."""
    return tl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def halves(words, DTYPE: tl.constexpr):
    """The two numbers of DTYPE in each word, in float32."""
    if DTYPE.is_bf16():  # shift and mask the word: with 16-bit halves ptxas would unpack and repack it
        low, high = (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    else:
        low = (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def larger_size(a, b, PAIRS: tl.constexpr, NATIVE: tl.constexpr):
    """Elementwise maximum of two `packed_magnitudes`."""
    if not PAIRS:
        result = tl.maximum(a, b)
    elif NATIVE:
        result = larger_pair_native(a, b)
    else:
        result = larger_pair(a, b)
    return result


@triton.jit
def largest_size(magnitudes, AXIS: tl.constexpr, PAIRS: tl.constexpr, NATIVE: tl.constexpr):
    """Maximum of `packed_magnitudes` along AXIS, None for all."""
    if not PAIRS:
        result = tl.max(magnitudes, AXIS)
    elif NATIVE:
        result = tl.reduce(magnitudes, AXIS, larger_pair_native)
    else:
        result = tl.reduce(magnitudes, AXIS, larger_pair)
    return result


@triton.jit
def size_amax(magnitudes, AXIS: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Largest `magnitude` along AXIS, 1 or None for all, from `packed_magnitudes` of elements of DTYPE."""
    PAIRS: tl.constexpr = DTYPE.primitive_bitwidth == 16
    largest = largest_size(magnitudes, AXIS, PAIRS, NATIVE)
    if PAIRS:
        low, high = halves(largest, DTYPE)
        amax = tl.maximum(magnitude(low), magnitude(high))
    else:
        amax = largest
    return amax


@triton.jit
def unpacked_halves(words, factor, DTYPE: tl.constexpr):
    """Unpack to even and odd columns, each (M, N / 2) float32, times `factor`."""
    if words.dtype == tl.int32:
        low, high = halves(words, DTYPE)
    else:
        low, high = tl.split(tl.reshape(words.to(tl.float32), (words.shape[0], words.shape[1] // 2, 2)))
    return low * factor, high * factor


@triton.jit
def unpacked(words, even, odd, DTYPE: tl.constexpr):
    """Unpack to float32 (M, N), even columns times `even`, odd columns times `odd`."""
    if words.dtype == tl.int32:
        low, high = halves(words, DTYPE)
        result = tl.reshape(tl.join(low * even, high * odd), (words.shape[0], 2 * words.shape[1]))
    else:
        result = words.to(tl.float32) * even
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
    """1 / scale, correctly rounded: the factor before `encode`."""
    return tl.div_rn(1.0, scale)


@triton.jit
def inverse_native(scale):
    """`inverse` without branches: a scale is normal, infinite or NaN, never subnormal or 0."""
    guess = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip
    return tl.where(scale == float("inf"), 0.0, tl.fma(guess, tl.fma(-scale, guess, 1.0), guess))


@triton.jit
def encode(x, q):
    """float32 to e4m3, rounded to nearest even, for a store through pointer `q`: bytes if q points to bytes."""
    if q.dtype.element_ty == tl.uint8:
        bits = x.to(tl.int32, bitcast=True)
        magnitude_bits = tl.minimum(bits & 0x7FFFFFFF, INFINITY)
        # drop 20 bits of the mantissa, change the exponent's bias from 127 to 7; above 464 is NaN, as in torch
        normal = tl.minimum(((magnitude_bits + 0x7FFFF + ((magnitude_bits >> 20) & 1)) >> 20) - (120 << 3), 0x7F)
        # below 2^-6 the spacing of e4m3 is 2^-9, which float32 has at 2^14: adding 2^14 rounds to it
        subnormal = (magnitude_bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
        code = tl.where(magnitude_bits < 0x3C800000, subnormal, normal)
        result = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        result = x.to(tl.float8e4nv)
    return result


@triton.jit
def encode_four(a, b, c, d, q, PTX: tl.constexpr):
    """`encode` four numbers into one int32, a lowest."""
    if PTX:  # convert pairs of two tensors; Triton's conversion pairs adjacent elements of one tensor
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
    """e4m3, or its bytes, to float32."""
    if q.dtype == tl.uint8:
        code = q.to(tl.int32)
        # place the fields of e4m3 in float16, which has one more bit of exponent: its bias is 8 larger
        half = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
        result = tl.where((code & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    else:
        result = q.to(tl.float32)
    return result
