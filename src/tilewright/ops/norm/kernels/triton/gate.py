"""The gate of a norm, and the rounding points of a gated norm."""

import triton
import triton.language as tl

from tilewright.ops.exponential import exp


@triton.jit
def activate(g, SILU: tl.constexpr, PRECISE: tl.constexpr):
    """act(g) and act'(g): of silu, g * sigmoid(g), or of the sigmoid."""
    # From e^-|g|: no overflow, and no cancellation in 1 - s
    e = exp(-tl.abs(g), PRECISE)
    large = 1.0 / (1.0 + e)
    if PRECISE:  # a step of Newton's: the division is good to 2 ULP
        large = tl.fma(large, tl.fma(-(1.0 + e), large, 1.0 + tl.zeros_like(e)), large)
    small = e * large
    s = tl.where(g >= 0, large, small)
    rest = tl.where(g >= 0, small, large)  # 1 - s
    act = s
    slope = s * rest
    if SILU:
        act = g * s
        slope = s + g * slope
    return act, slope


@triton.jit
def weighted(x_hat, w, x, weight, FP32_WEIGHT: tl.constexpr):
    """x_hat as it is multiplied by the weight, and the product as it is multiplied by the gate."""
    product = x_hat * w
    if not FP32_WEIGHT:  # round to x's dtype before the weight, as the models do
        x_hat = x_hat.to(x.dtype.element_ty).to(tl.float32)
        product = x_hat * w
        if x.dtype.element_ty == weight.dtype.element_ty:
            product = product.to(x.dtype.element_ty).to(tl.float32)
    return x_hat, product
