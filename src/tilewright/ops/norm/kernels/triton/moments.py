"""Mean and variance of the norms that subtract a mean, in two passes.

The second pass subtracts the mean and then corrects it: it sums the deviations, which are not zero if the mean is off
by an ULP, and subtracts their mean as well (Chan, Golub, LeVeque, 1983).  So equal values give zeros, however large the
value and however small eps.
"""

import triton
import triton.language as tl


@triton.jit
def _add_pair(a, b, c, d):
    return a + c, b + d


@triton.jit
def sum_pair(a, b, AXIS: tl.constexpr):
    """Sums of a and of b along one axis, in one exchange between threads."""
    return tl.reduce((a, b), AXIS, _add_pair)


@triton.jit
def variance_of(deviation, square, inv_n):
    """(correction of the mean, variance) from the sums of the deviations and of their squares.   inv_n: 1 / N."""
    shift = deviation * inv_n
    corrected = tl.where(square < float("inf"), tl.maximum(square - deviation * shift, 0.0), square)  # NaN stays NaN
    return shift, corrected * inv_n
