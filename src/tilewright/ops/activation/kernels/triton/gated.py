"""Gated activations in Triton: one kernel forward, one backward, for swiglu, geglu, silu_and_mul and gelu_and_mul.

A tile is BLOCK neighbouring elements of one row; `up_offset` and the strides tell packed from split tensors, and
contiguous split tensors count as one long row.  Every thread has several independent 16-byte loads in flight.
Traffic: forward 6*M*N bytes at bf16, so 8192x14336 cannot beat 168 us at 4.2 TB/s; backward reads dout, gate and up and
writes two gradients, 10*M*N, 280 us.  The backward recomputes act(gate): nothing is saved but the inputs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.activation import geglu, gelu_and_mul, silu_and_mul, swiglu
from tilewright.ops.exponential import exp
from tilewright.ops.row_grid import grid_of, row_of_grid
from tilewright.ops.rows import RowsBucket, as_rows
from tilewright.ops.unaligned_rows import unit_of

FILL = 512  # minimum tiles before tiles grow: about four for each SM of an H200
GELU = {"tanh": "gelu_tanh", "none": "gelu"}


class Config(NamedTuple):
    block: int
    num_warps: int


def _tile(dtype: torch.dtype) -> Config:
    """One 16-byte vector a thread and tensor.

    Two vectors, or programs that loop over several tiles, are slower: 164.7 us and more against 163.6 at 8192x14336
    (H200, 2026-11).
    """
    return Config(128 * 16 // dtype.itemsize, 4)


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    """Whole vectors where tiles of them give every SM work; latency decides small problems."""
    tile = _tile(dtype)
    return tile if FILL * tile.block <= bucket.M * bucket.N else FEW


FEW = Config(512, num_warps=4)
"""A few rows: more threads, with shorter accesses.  64 rows of 2560, packed, take 1.46 us, 1.54 with one warp and a
vector a thread; 16 of 14336 1.64 and 1.70; 1 row of 18944 1.29 and 1.31 (H200, 2026-11)."""
CONFIGS = tuple(dict.fromkeys((_tile(torch.bfloat16), _tile(torch.float32), FEW)))


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """One element to four vectors a thread: small problems need many threads, large ones long accesses."""
    vector = 16 // dtype.itemsize
    each = (1, 2, 4, vector) if bucket.M * bucket.N < FILL * 2048 else (4, vector, 2 * vector, 4 * vector)
    tiles = (Config(32 * warps * elements, warps) for elements in dict.fromkeys(each) for warps in (1, 2, 4, 8))
    return tuple(c for c in tiles if c.block >= 128)


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
    if ACT == "gelu":
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
def gated(act, g, u):
    """act * u in float32; act is rounded to the input's dtype first, as the models do."""
    return act.to(g.dtype).to(tl.float32) * u.to(tl.float32)


@triton.jit
def _gated_tile(out, gate, up, out_start, gate_start, up_start, offs, mask, ACT: tl.constexpr):
    # Load gate and up
    g = tl.load(gate + gate_start + offs, mask=mask)
    u = tl.load(up + up_start + offs, mask=mask)
    # Compute and store out
    act, _ = activate(g.to(tl.float32), ACT, g.dtype == tl.float32)
    out_fp32 = gated(act, g, u)
    tl.store(out + out_start + offs, out_fp32.to(out.dtype.element_ty), mask=mask)


# Sizes and strides count units of UNIT elements.  Where they are whole vectors, but no multiples of 16, the compiler
# sees so.  A single row may have `tail` elements more than its units, which the first program takes.
@triton.jit
def _gated_kernel(
    out, gate, up, units, rows, unit_stride_gate, unit_stride_up, unit_up_offset, tail,
    ACT: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip  # out: (M, N)   gate, up: (M, N) by stride
    """out = act(gate) * up, one tile a program."""
    VECTOR: tl.constexpr = 128 // gate.dtype.element_ty.primitive_bitwidth  # elements in 16 bytes
    N, up_offset = units * UNIT, unit_up_offset * UNIT
    stride_gate, stride_up = unit_stride_gate * UNIT, unit_stride_up * UNIT
    offs = tl.arange(0, BLOCK)
    row_idx, start = row_of_grid(), tl.program_id(0).to(tl.int64) * BLOCK
    mask = (offs < N - start) & (row_idx < rows)
    gate_start, up_start = row_idx * stride_gate + start, row_idx * stride_up + up_offset + start
    _gated_tile(out, gate, up, row_idx * N + start, gate_start, up_start, offs, mask, ACT)
    if TAIL:  # noqa: SIM102  a constant
        if start == 0:
            rest = tl.arange(0, VECTOR)
            _gated_tile(out, gate, up, N, N, N, rest, rest < tail, ACT)


@triton.jit
def _gated_backward_tile(
    dgate, dup, dout, gate, up, dgate_start, dup_start, dout_start, gate_start, up_start, offs, mask,
    ACT: tl.constexpr,
):  # fmt: skip
    # Load gate, up and dout
    g = tl.load(gate + gate_start + offs, mask=mask)
    u = tl.load(up + up_start + offs, mask=mask).to(tl.float32)
    d = tl.load(dout + dout_start + offs, mask=mask).to(tl.float32)
    # Recompute the activation
    act, slope = activate(g.to(tl.float32), ACT, g.dtype == tl.float32)
    # Compute and store dgate and dup; autograd rounds the gradient of act(gate) to the input's dtype
    dact = (d * u).to(g.dtype).to(tl.float32)
    tl.store(dgate + dgate_start + offs, (dact * slope).to(dgate.dtype.element_ty), mask=mask)
    tl.store(dup + dup_start + offs, (d * act.to(g.dtype).to(tl.float32)).to(dup.dtype.element_ty), mask=mask)


@triton.jit
def _gated_backward_kernel(
    dgate, dup, dout, gate, up, units, rows,  # dout: (M, N)   dgate, dup: (M, N) by stride_grad
    unit_stride_grad, unit_stride_dout, unit_stride_gate, unit_stride_up, unit_up_offset, tail,
    ACT: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """dgate = dout * up * act'(gate) and dup = dout * act(gate), elementwise, one tile a program."""
    VECTOR: tl.constexpr = 128 // gate.dtype.element_ty.primitive_bitwidth  # elements in 16 bytes
    N, up_offset = units * UNIT, unit_up_offset * UNIT
    stride_grad, stride_dout = unit_stride_grad * UNIT, unit_stride_dout * UNIT
    stride_gate, stride_up = unit_stride_gate * UNIT, unit_stride_up * UNIT
    offs = tl.arange(0, BLOCK)
    row_idx, start = row_of_grid(), tl.program_id(0).to(tl.int64) * BLOCK
    mask = (offs < N - start) & (row_idx < rows)
    gate_start, up_start = row_idx * stride_gate + start, row_idx * stride_up + up_offset + start
    dout_start, grad_start = row_idx * stride_dout + start, row_idx * stride_grad + start
    starts = grad_start, grad_start + up_offset, dout_start, gate_start, up_start
    _gated_backward_tile(dgate, dup, dout, gate, up, *starts, offs, mask, ACT)
    if TAIL:  # noqa: SIM102  a constant
        if start == 0:
            rest = tl.arange(0, VECTOR)
            _gated_backward_tile(dgate, dup, dout, gate, up, N, N, N, N, N, rest, rest < tail, ACT)


_forward = TritonKernel(_gated_kernel)
_backward = TritonKernel(_gated_backward_kernel)


def _in_units(m: int, n: int, layout: tuple[int, ...], itemsize: int) -> tuple[int, tuple[int, ...], int, int]:
    """(units, layout in units, tail, unit): 1 where the compiler knows enough, or nothing helps, else a vector."""
    single = m == 1 and layout[-1] == 0  # its strides are of no account
    layout = (0,) * len(layout) if single else layout
    tail = n % (16 // itemsize) if single else 0
    unit = unit_of(itemsize, n - tail, *layout)
    if tail and n - tail >= 1 << 31:  # the tail begins at a number of 32 bits
        return n, layout, 0, 1
    return (n - tail) // unit, tuple(size // unit for size in layout), tail, unit


def split(out: Tensor, gate: Tensor, up: Tensor, act: str, config: Config) -> None:
    """out = act(gate) * up.   gate, up: (..., N)."""
    if gate.is_contiguous() and up.is_contiguous():
        _launch(out, gate, up, (1, gate.numel()), (0, 0, 0), act, config)
    else:
        gate, up = as_rows(gate), as_rows(up)
        _launch(out, gate, up, gate.shape, (gate.stride(0), up.stride(0), 0), act, config)


def packed(out: Tensor, x: Tensor, act: str, config: Config) -> None:
    """out = act(x[..., :N]) * x[..., N:].   x: (..., 2N)."""
    x = as_rows(x)
    m, n = x.shape[0], x.shape[1] // 2
    _launch(out, x, x, (m, n), (x.stride(0), x.stride(0), n), act, config)


def _launch(
    out: Tensor,
    gate: Tensor,
    up: Tensor,
    shape: tuple[int, int],
    layout: tuple[int, int, int],
    act: str,
    config: Config,
) -> None:
    """`layout`: row strides of gate and up, and the offset of up."""
    m, n = shape
    units, layout, tail, unit = _in_units(m, n, layout, gate.itemsize)
    parameters = (out, gate, up, units, m, *layout, tail)
    _forward(
        grid_of(triton.cdiv(n, config.block), m),
        parameters,
        (act, config.block, unit, tail > 0),
        num_warps=config.num_warps,
    )


def split_backward(
    dgate: Tensor, dup: Tensor, dout: Tensor, gate: Tensor, up: Tensor, act: str, config: Config
) -> None:
    """Gradients of `split`.   dout: (..., N)."""
    if dout.is_contiguous() and gate.is_contiguous() and up.is_contiguous():
        _launch_backward(dgate, dup, dout, gate, up, (1, gate.numel()), (0, 0, 0, 0, 0), act, config)
        return
    dout, gate, up = as_rows(dout), as_rows(gate), as_rows(up)
    m, n = gate.shape
    layout = (n, dout.stride(0), gate.stride(0), up.stride(0), 0)
    _launch_backward(dgate, dup, dout, gate, up, (m, n), layout, act, config)


def packed_backward(dx: Tensor, dout: Tensor, x: Tensor, act: str, config: Config) -> None:
    """Gradient of `packed`, packed in the same way."""
    dout, x = as_rows(dout), as_rows(x)
    m, n = dout.shape
    layout = (2 * n, dout.stride(0), x.stride(0), x.stride(0), n)
    _launch_backward(dx, dx, dout, x, x, (m, n), layout, act, config)


def _launch_backward(
    dgate: Tensor,
    dup: Tensor,
    dout: Tensor,
    gate: Tensor,
    up: Tensor,
    shape: tuple[int, int],
    layout: tuple[int, int, int, int, int],
    act: str,
    config: Config,
) -> None:
    """`layout`: row strides of the gradients, dout, gate and up, and the offset of the second half."""
    m, n = shape
    units, layout, tail, unit = _in_units(m, n, layout, gate.itemsize)
    parameters = (dgate, dup, dout, gate, up, units, m, *layout, tail)
    _backward(
        grid_of(triton.cdiv(n, config.block), m),
        parameters,
        (act, config.block, unit, tail > 0),
        num_warps=config.num_warps,
    )


_TUNING = {"configure": configure, "config_type": Config, "configs": CONFIGS, "candidates": candidates}


@register_kernel(swiglu.FORWARD, **_TUNING)
def launch_swiglu(outs: tuple[Tensor], args: swiglu.SwigluArgs, config: Config) -> None:
    split(outs[0], args.gate, args.up, "silu", config)


@register_kernel(swiglu.BACKWARD, **_TUNING)
def launch_swiglu_backward(outs: tuple[Tensor, Tensor], args: swiglu.SwigluBackwardArgs, config: Config) -> None:
    split_backward(*outs, args.dout, args.gate, args.up, "silu", config)


@register_kernel(geglu.FORWARD, **_TUNING)
def launch_geglu(outs: tuple[Tensor], args: geglu.GegluArgs, config: Config) -> None:
    split(outs[0], args.gate, args.up, GELU[args.approximate], config)


@register_kernel(geglu.BACKWARD, **_TUNING)
def launch_geglu_backward(outs: tuple[Tensor, Tensor], args: geglu.GegluBackwardArgs, config: Config) -> None:
    split_backward(*outs, args.dout, args.gate, args.up, GELU[args.approximate], config)


@register_kernel(silu_and_mul.FORWARD, **_TUNING)
def launch_silu_and_mul(outs: tuple[Tensor], args: silu_and_mul.SiluAndMulArgs, config: Config) -> None:
    packed(outs[0], args.x, "silu", config)


@register_kernel(silu_and_mul.BACKWARD, **_TUNING)
def launch_silu_and_mul_backward(
    outs: tuple[Tensor], args: silu_and_mul.SiluAndMulBackwardArgs, config: Config
) -> None:
    packed_backward(outs[0], args.dout, args.x, "silu", config)


@register_kernel(gelu_and_mul.FORWARD, **_TUNING)
def launch_gelu_and_mul(outs: tuple[Tensor], args: gelu_and_mul.GeluAndMulArgs, config: Config) -> None:
    packed(outs[0], args.x, GELU[args.approximate], config)


@register_kernel(gelu_and_mul.BACKWARD, **_TUNING)
def launch_gelu_and_mul_backward(
    outs: tuple[Tensor], args: gelu_and_mul.GeluAndMulBackwardArgs, config: Config
) -> None:
    packed_backward(outs[0], args.dout, args.x, GELU[args.approximate], config)
