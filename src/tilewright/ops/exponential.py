"""e^x for Triton kernels: fast for results that are rounded to 16 bits, accurate for float32 results; and ln x."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# ln 2 in two parts; the high part has 10 bits, so that n * LN2_HIGH is exact
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(-2.1219444005469057e-4)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds a float32 to an integer


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
