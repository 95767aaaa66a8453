"""The arithmetic of `sampling.numbers` in Triton, bit for bit: integers, and float32 steps that no compiler fuses."""

import triton
import triton.language as tl

from tilewright.ops.sampling import numbers

UNIT = tl.constexpr(numbers.UNIT)
LOG2E = tl.constexpr(numbers.LOG2E)
LARGEST = tl.constexpr(numbers.LARGEST)
STEEPEST = tl.constexpr(numbers.STEEPEST)
NOTHING = tl.constexpr(numbers.NOTHING)
C0, C1, C2, C3, C4, C5 = (tl.constexpr(c) for c in numbers.POLYNOMIAL)


@triton.jit
def load_clean(x, offs, mask):
    """Logits as float32, with NaN as -inf and +inf as the largest number."""
    value = tl.load(x + offs, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(value > LARGEST, LARGEST, tl.where(value == value, value, float("-inf")))


@triton.jit
def ordered(x):
    """int32 in the order of float32 x, with one for 0.0 and -0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value(key):
    """The float32 whose `ordered` is this int32."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def slope(temperature):
    """log2(e) / temperature."""
    return tl.minimum(tl.div_rn(tl.full((), LOG2E, tl.float32), tl.where(temperature > 0, temperature, 1.0)), STEEPEST)


@triton.jit
def weights(x, largest, slope):
    """int64 weights of clean logits below a finite maximum."""
    t = tl.minimum((largest - x) * slope, 64.0)
    fixed = (t * 16777216.0).to(tl.int32)
    n = fixed >> 24
    f = ((fixed & 0xFFFFFF) << 8).to(tl.uint32, bitcast=True)  # umulhi shifts by 32, the reference by 31
    y = tl.full(f.shape, C5, tl.uint32)
    y = tl.full(f.shape, C4, tl.uint32) - tl.umulhi(f, y)
    y = tl.full(f.shape, C3, tl.uint32) - tl.umulhi(f, y)
    y = tl.full(f.shape, C2, tl.uint32) - tl.umulhi(f, y)
    y = tl.full(f.shape, C1, tl.uint32) - tl.umulhi(f, y)
    y = tl.full(f.shape, C0, tl.uint32) - tl.umulhi(f, y)
    mantissa = 4294967296 - tl.umulhi(f, y).to(tl.int64)
    return tl.where(n <= UNIT, (mantissa << (UNIT - 32)) >> tl.minimum(n, UNIT).to(tl.int64), 0)


@triton.jit
def share(total, p):
    """ceil(p * total)."""
    p = tl.where(p < 1.0, tl.where(p > 0.0, p, 0.0), 1.0)
    parts = tl.maximum((p * 16777216.0).to(tl.int64), 1)
    return (total >> 24) * parts + (((total & 0xFFFFFF) * parts + 0xFFFFFF) >> 24)


@triton.jit
def least(min_p):
    """The smallest weight that min_p leaves."""
    return (tl.where(min_p > 0.0, tl.where(min_p < 1.0, min_p, 1.0), 0.0) * 1099511627776.0).to(tl.int64)


@triton.jit
def random62(seed, position, STREAM: tl.constexpr):
    """Two random int64 of 31 bits."""
    c0 = (position & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    stream = tl.full(c0.shape, STREAM, tl.uint32)
    high, low, _, _ = tl.philox(seed, c0, c1, stream, tl.zeros_like(stream))
    return (high >> 1).to(tl.int64), (low >> 1).to(tl.int64)


@triton.jit
def below(high, low, total):
    """floor(r * total / 2^62) of the 62 bits r = (high, low)."""
    total_high, total_low = total >> 31, total & 0x7FFFFFFF
    return high * total_high + ((high * total_low + low * total_high + ((low * total_low) >> 31)) >> 31)
