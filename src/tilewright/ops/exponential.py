"""e^x for Triton kernels: fast for results that are rounded to 16 bits, accurate for float32 results; and ln x.

An SM of a GPU evaluates 16 special functions (ex2, lg2) a cycle beside 128 multiply-adds.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# ln 2 in two parts; the high part has 10 bits, so that n * LN2_HIGH is exact
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(-2.1219444005469057e-4)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds a float32 to an integer
ROUND_BITS = tl.constexpr(0x4B400000)  # of ROUND as a float32
SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)  # of sqrt(1/2)


@triton.jit
def exp(x: tl.tensor, PRECISE: tl.constexpr) -> tl.tensor:
    """e^x of float32 x; e^-inf is 0, NaN stays.

    Else exp2(x * log2(e)): rounding the product costs a relative error of |x| * 2^-24, results below 2^-126 are 0.
    PRECISE: x = n * ln 2 + r with |r| < 0.35 first (Cody and Waite, 1980), so that the error does not grow with x.
    """
    if PRECISE:
        n = tl.minimum(tl.maximum(x * LOG2E + ROUND - ROUND, -126.0), 127.0)  # n stays finite for an infinite x
        r = (x - n * LN2_HIGH) - n * LN2_LOW
        result = tl.exp2(r * LOG2E) * tl.exp2(n)
    else:
        result = tl.exp2(x * LOG2E)
    return result


@triton.jit
def log(x: tl.tensor) -> tl.tensor:
    """ln x of a sum of exponentials, to float32's accuracy also near 1: one step of Newton after the fast one."""
    y = tl.log(x)
    return tl.where((x > 0.0) & (x < float("inf")), y + (x * exp(-y, True) - 1.0), y)


@triton.jit
def log_of_normal(x: tl.tensor) -> tl.tensor:
    """ln x of a normal float32 x above 0 by the special-function unit of NVIDIA's GPUs: to float32's accuracy up to 1/2
    and from 2 on, within 2^-22 between.
    """
    y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y * LN2


@triton.jit
def log_by_polynomial(x: tl.tensor) -> tl.tensor:
    """ln x of a normal float32 x above 0, to float32's accuracy, without a special function (logf of the Cephes
    library, Moshier, 1987): x = m * 2^n with m in [sqrt(1/2), sqrt(2)), ln m by a polynomial in m - 1.
    """
    bits = x.to(tl.int32, bitcast=True)
    n = (bits - SQRT_HALF_BITS) >> 23
    n_fp32 = (n + ROUND_BITS).to(tl.float32, bitcast=True) - ROUND
    f = (bits - (n << 23)).to(tl.float32, bitcast=True) - 1.0
    p = f * 7.0376836292e-2 - 1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f - 1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f - 1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    square = f * f
    return (f + (f * square * p + n_fp32 * LN2_LOW - 0.5 * square)) + n_fp32 * LN2_HIGH
