"""Activations and their derivatives in float32, for every Triton kernel that gates: alone, quantising, of experts."""

import triton
import triton.language as tl

from tilewright.ops.exponential import exp


@triton.jit
def normal(g, PRECISE: tl.constexpr):  # g: (BLOCK,) fp32 -> the normal distribution's cdf, e^(-g^2 / 2)
    """(1 + erf) / 2 cancels below zero: at -5 two digits are left, at -6 none.

    The cdf at -a <= 0 is e^(-a^2 / 2) q(t) t, t = 1 / (1 + 0.3 a), with q the minimax polynomial of `cpu/gated.cpp`,
    whose relative error is 2^-28; rounding raises it to 6 * 2^-24, plus the errors of e^x and of a division.  If not
    PRECISE, e^(-a^2 / 2) adds 2^-18 at -13, where the cdf leaves the range of float32.
    """
    a = tl.minimum(tl.abs(g), 40.0)  # from 15 on e^(-a^2 / 2) is 0, and the square of infinity has no low part
    if PRECISE:
        # the exponential magnifies the half ULP of error in a^2 / 2: split a at z of 12 bits, whose square is exact
        z = tl.floor(64.0 * a) * 0.015625
        bell = exp(-0.5 * z * z, PRECISE) * exp(-0.5 * (a - z) * (a + z), False)
    else:
        bell = exp(-0.5 * a * a, PRECISE)
    t = 1.0 / (1.0 + 0.3 * a)
    q = -0.020628701895475388 * t + 0.1124650090932846
    q = q * t - 0.2282852828502655
    q = q * t + 0.19188395142555237
    q = q * t - 0.07950970530509949
    q = q * t + 0.0962052047252655
    q = q * t + 0.07837212830781937
    q = q * t + 0.11023936420679092
    q = q * t + 0.11957131326198578
    q = q * t + 0.11968671530485153
    tail = bell * (q * t)
    if PRECISE:  # near and above 0, where nothing cancels, erf is right to an ULP
        cdf = tl.where(g < -1.0, tail, 0.5 + 0.5 * tl.erf(g * 0.7071067811865476))
    else:
        cdf = tl.where(g < 0, tail, 1.0 - tail)
    return cdf, bell


@triton.jit
def activate(g, ACT: tl.constexpr, PRECISE: tl.constexpr):  # g: (BLOCK,) fp32 -> act(g), act'(g)
    if ACT == "relu2":
        r = tl.where(g <= 0, 0.0, g)  # NaN stays
        act = r * r
        slope = 2.0 * r
    elif ACT == "gelu":
        cdf, bell = normal(g, PRECISE)
        act = g * cdf
        slope = cdf + g * bell * 0.3989422804014327
    else:  # g * sigmoid(u); in GELU's tanh form (1 + tanh(z)) / 2 is sigmoid(2 z)
        u = g
        du = 1.0
        if ACT == "gelu_tanh":
            u = 1.5957691216057308 * (g + 0.044715 * g * g * g)
            du = 1.5957691216057308 * (1.0 + 0.134145 * g * g)
        # from e^-|u|: no overflow, and no cancellation in 1 - s, which du would magnify
        e = exp(-tl.abs(u), PRECISE)
        if PRECISE:
            large = 1.0 / (1.0 + e)  # good to 2 ULP; a step of Newton's takes two instructions, a division ten
            large = tl.fma(large, tl.fma(-(1.0 + e), large, 1.0 + tl.zeros_like(e)), large)
        else:
            large = 1.0 / (1.0 + e)
        small = e * large
        s = tl.where(u >= 0, large, small)
        rest = tl.where(u >= 0, small, large)  # 1 - s
        act = g * s
        slope = s + g * s * rest * du
    return act, slope


@triton.jit
def limited(g, u, limit):  # g, u: (BLOCK,) -> min(g, limit), u within -limit .. limit, whether each was within before
    g_fp32, u_fp32 = g.to(tl.float32), u.to(tl.float32)
    gate_passes, up_passes = g_fp32 <= limit, (u_fp32 >= -limit) & (u_fp32 <= limit)
    # Comparisons rather than minima: NaN stays
    gate = tl.where(g_fp32 > limit, limit, g_fp32)
    up = tl.where(u_fp32 > limit, limit, tl.where(u_fp32 < -limit, -limit, u_fp32))
    return gate.to(g.dtype), up.to(u.dtype), gate_passes, up_passes


@triton.jit
def clamped(g, u, alpha, limit, PRECISE: tl.constexpr):  # g, u: (BLOCK,) fp32
    """gpt-oss' gate: act = c sigmoid(alpha c) of c = min(g, limit), and factor = 1 + (u clamped to -limit .. limit).

    Returns act, factor, act'(c), and whether g and u are within the limit: where not, their gradients are 0.
    """
    g, u, gate_passes, up_passes = limited(g, u, limit)
    z = alpha * g
    e = exp(-tl.abs(z), PRECISE)
    s, rest = tl.where(z >= 0, 1.0, e) / (1.0 + e), tl.where(z >= 0, e, 1.0) / (1.0 + e)
    return g * s, u + 1.0, s + z * s * rest, gate_passes, up_passes
