"""What the softmax kernels share: the initial maximum, and the formulas of softmax and, with LOG, of its logarithm."""

import triton
import triton.language as tl

from tilewright.ops.exponential import exp, log

LOWEST = tl.constexpr(-3.4028234663852886e38)  # initial maximum; -inf would give -inf - -inf = NaN


@triton.jit
def row_scale(l_i, LOG: tl.constexpr):
    """What `scaled` needs of the sum of exponentials: 1 / l_i, or its logarithm."""
    if LOG:
        scale = log(l_i)
    else:
        scale = tl.div_rn(1.0, l_i)
    return scale


@triton.jit
def scaled(x_fp32, m_i, scale, PRECISE: tl.constexpr, LOG: tl.constexpr):
    """exp(x - m_i) * scale, or x - m_i - scale."""
    if LOG:
        y = (x_fp32 - m_i) - scale
    else:
        y = exp(x_fp32 - m_i, PRECISE) * scale
    return y


@triton.jit
def weighted(dy_fp32, y_fp32, LOG: tl.constexpr):
    """The terms of a row's sum in the backward: dy * y, or dy."""
    if LOG:
        terms = dy_fp32
    else:
        terms = dy_fp32 * y_fp32
    return terms


@triton.jit
def row_gradient(dy_fp32, y_fp32, dot, PRECISE: tl.constexpr, LOG: tl.constexpr):
    """y * (dy - dot), or dy - exp(y) * dot, where dot is the sum of `weighted`."""
    if LOG:
        dx = dy_fp32 - exp(y_fp32, PRECISE) * dot
    else:
        dx = y_fp32 * (dy_fp32 - dot)
    return dx
