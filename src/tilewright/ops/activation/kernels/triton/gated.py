"""Gated activations in Triton: one kernel forward, one backward, for swiglu, geglu, silu_and_mul, gelu_and_mul, relu2.

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
from tilewright.ops.activation.kernels.triton.activations import activate, limited
from tilewright.ops.dependent import DependentKernel, wait_and_launch_dependents
from tilewright.ops.row_grid import grid_of, row_of_grid
from tilewright.ops.rows import PlainRowsBucket, RowsBucket, as_rows
from tilewright.ops.unaligned_rows import unit_of

FILL = 512  # minimum tiles before tiles grow: about four for each SM of an H200
GELU = {"tanh": "gelu_tanh", "none": "gelu"}


class Options(NamedTuple):
    """What may happen to gate and up first.  None is known to the compiler: it costs nothing."""

    multiplier: float | None = None  # of gate, the product rounded
    limit: float | None = None  # then gate <= limit and -limit <= up <= limit


PLAIN = Options()


class Config(NamedTuple):
    block: int
    num_warps: int


def _tile(dtype: torch.dtype) -> Config:
    """One 16-byte vector a thread and tensor.

    Two vectors, or programs that loop over several tiles, are slower: 164.7 us and more against 163.6 at 8192x14336
    (H200, 2026-11).
    """
    return Config(128 * 16 // dtype.itemsize, 4)


def configure(bucket: RowsBucket | PlainRowsBucket, dtype: torch.dtype) -> Config:
    """Whole vectors where tiles of them give every SM work; latency decides small problems."""
    tile = _tile(dtype)
    return tile if FILL * tile.block <= bucket.M * bucket.N else FEW


FEW = Config(512, num_warps=4)
"""A few rows: more threads, with shorter accesses.  64 rows of 2560, packed, take 1.46 us, 1.54 with one warp and a
vector a thread; 16 of 14336 1.64 and 1.70; 1 row of 18944 1.29 and 1.31 (H200, 2026-11)."""
CONFIGS = tuple(dict.fromkeys((_tile(torch.bfloat16), _tile(torch.float32), FEW)))


def candidates(bucket: RowsBucket | PlainRowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """One element to four vectors a thread: small problems need many threads, large ones long accesses."""
    vector = 16 // dtype.itemsize
    each = (1, 2, 4, vector) if bucket.M * bucket.N < FILL * 2048 else (4, vector, 2 * vector, 4 * vector)
    tiles = (Config(32 * warps * elements, warps) for elements in dict.fromkeys(each) for warps in (1, 2, 4, 8))
    return tuple(c for c in tiles if c.block >= 128)


@triton.jit
def gated(act, g, u):
    """act * u in float32; act is rounded to the input's dtype first, as the models do."""
    return act.to(g.dtype).to(tl.float32) * u.to(tl.float32)


@triton.jit
def _load(gate, up, gate_start, up_start, offs, mask, multiplier):  # -> gate * multiplier, up (gate, if there is none)
    g = tl.load(gate + gate_start + offs, mask=mask)
    u = g
    if up is not None:
        u = tl.load(up + up_start + offs, mask=mask)
    if multiplier is not None:
        g = (g.to(tl.float32) * multiplier).to(g.dtype)
    return g, u


@triton.jit
def _gated_tile(
    out, gate, up, out_start, gate_start, up_start, offs, mask, multiplier, limit, ACT: tl.constexpr
):  # fmt: skip
    # Load gate and up
    g, u = _load(gate, up, gate_start, up_start, offs, mask, multiplier)
    if limit is not None:
        g, u, _, _ = limited(g, u, limit)
    # Compute and store out
    act, _ = activate(g.to(tl.float32), ACT, g.dtype == tl.float32)
    out_fp32 = act
    if up is not None:
        out_fp32 = gated(act, g, u)
    tl.store(out + out_start + offs, out_fp32.to(out.dtype.element_ty), mask=mask)


# Sizes and strides count units of UNIT elements.  Where they are whole vectors, but no multiples of 16, the compiler
# sees so.  A single row may have `tail` elements more than its units, which the first program takes.
@triton.jit
def _gated_kernel(
    out, gate, up, units, rows, unit_stride_gate, unit_stride_up, unit_up_offset, tail, multiplier, limit,
    ACT: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, TAIL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip  # out: (M, N)   gate, up: (M, N) by stride
    """out = act(gate) * up, or act(gate) without up, one tile a program."""
    wait_and_launch_dependents(DEPENDENT)
    VECTOR: tl.constexpr = 128 // gate.dtype.element_ty.primitive_bitwidth  # elements in 16 bytes
    N, up_offset = units * UNIT, unit_up_offset * UNIT
    stride_gate, stride_up = unit_stride_gate * UNIT, unit_stride_up * UNIT
    offs = tl.arange(0, BLOCK)
    row_idx, start = row_of_grid(), tl.program_id(0).to(tl.int64) * BLOCK
    mask = (offs < N - start) & (row_idx < rows)
    gate_start, up_start = row_idx * stride_gate + start, row_idx * stride_up + up_offset + start
    _gated_tile(out, gate, up, row_idx * N + start, gate_start, up_start, offs, mask, multiplier, limit, ACT)
    if TAIL:  # noqa: SIM102  a constant
        if start == 0:
            rest = tl.arange(0, VECTOR)
            _gated_tile(out, gate, up, N, N, N, rest, rest < tail, multiplier, limit, ACT)


@triton.jit
def _gated_backward_tile(
    dgate, dup, dout, gate, up, dgate_start, dup_start, dout_start, gate_start, up_start, offs, mask,
    multiplier, limit, ACT: tl.constexpr,
):  # fmt: skip
    # Load gate, up and dout
    g, u = _load(gate, up, gate_start, up_start, offs, mask, multiplier)
    if limit is not None:
        g, u, gate_passes, up_passes = limited(g, u, limit)
    d = tl.load(dout + dout_start + offs, mask=mask).to(tl.float32)
    # Recompute the activation
    act, slope = activate(g.to(tl.float32), ACT, g.dtype == tl.float32)
    # Compute and store dgate and dup; autograd rounds the gradient of act(gate) to the input's dtype
    dact = d
    if up is not None:
        dact = (d * u.to(tl.float32)).to(g.dtype).to(tl.float32)
    dg = dact * slope
    if ACT == "relu2":
        dg = tl.where(slope == 0, 0.0, dg)  # also of an infinite gradient
    if limit is not None:
        dg = tl.where(gate_passes, dg, 0.0)
    if multiplier is not None:
        dg = dg.to(g.dtype).to(tl.float32) * multiplier
    tl.store(dgate + dgate_start + offs, dg.to(dgate.dtype.element_ty), mask=mask)
    if up is not None:
        du = d * act.to(g.dtype).to(tl.float32)
        if limit is not None:
            du = tl.where(up_passes, du, 0.0)
        tl.store(dup + dup_start + offs, du.to(dup.dtype.element_ty), mask=mask)


@triton.jit
def _gated_backward_kernel(
    dgate, dup, dout, gate, up, units, rows,  # dout: (M, N)   dgate, dup: (M, N) by stride_grad
    unit_stride_grad, unit_stride_dout, unit_stride_gate, unit_stride_up, unit_up_offset, tail, multiplier, limit,
    ACT: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """dgate = dout * up * act'(gate) and dup = dout * act(gate), elementwise, one tile a program.

    Without up the first alone, dout * act'(gate).
    """
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
    _gated_backward_tile(dgate, dup, dout, gate, up, *starts, offs, mask, multiplier, limit, ACT)
    if TAIL:  # noqa: SIM102  a constant
        if start == 0:
            rest = tl.arange(0, VECTOR)
            _gated_backward_tile(dgate, dup, dout, gate, up, N, N, N, N, N, rest, rest < tail, multiplier, limit, ACT)


_forward = DependentKernel(_gated_kernel)
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


def split(out: Tensor, gate: Tensor, up: Tensor | None, act: str, config: Config, options: Options = PLAIN) -> None:
    """out = act(gate) * up, or act(gate) where there is no up.   gate, up: (..., N)."""
    if gate.is_contiguous() and (up is None or up.is_contiguous()):
        _launch(out, gate, up, (1, gate.numel()), (0, 0, 0), act, config, options)
    else:
        gate, up = as_rows(gate), None if up is None else as_rows(up)
        _launch(out, gate, up, gate.shape, (gate.stride(0), _row_stride(up), 0), act, config, options)


def _row_stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


def packed(out: Tensor, x: Tensor, act: str, config: Config) -> None:
    """out = act(x[..., :N]) * x[..., N:].   x: (..., 2N)."""
    x = as_rows(x)
    m, n = x.shape[0], x.shape[1] // 2
    _launch(out, x, x, (m, n), (x.stride(0), x.stride(0), n), act, config)


def _launch(
    out: Tensor,
    gate: Tensor,
    up: Tensor | None,
    shape: tuple[int, int],
    layout: tuple[int, int, int],
    act: str,
    config: Config,
    options: Options = PLAIN,
) -> None:
    """`layout`: row strides of gate and up, and the offset of up."""
    m, n = shape
    units, layout, tail, unit = _in_units(m, n, layout, gate.itemsize)
    parameters = (out, gate, up, units, m, *layout, tail, *options)
    _forward(
        grid_of(triton.cdiv(n, config.block), m),
        parameters,
        (act, config.block, unit, tail > 0),
        num_warps=config.num_warps,
    )


def split_backward(
    dgate: Tensor,
    dup: Tensor | None,
    dout: Tensor,
    gate: Tensor,
    up: Tensor | None,
    act: str,
    config: Config,
    options: Options = PLAIN,
) -> None:
    """Gradients of `split`, dup None where there is no up.   dout: (..., N)."""
    if dout.is_contiguous() and gate.is_contiguous() and (up is None or up.is_contiguous()):
        _launch_backward(dgate, dup, dout, gate, up, (1, gate.numel()), (0, 0, 0, 0, 0), act, config, options)
        return
    dout, gate, up = as_rows(dout), as_rows(gate), None if up is None else as_rows(up)
    m, n = gate.shape
    layout = (n, dout.stride(0), gate.stride(0), _row_stride(up), 0)
    _launch_backward(dgate, dup, dout, gate, up, (m, n), layout, act, config, options)


def packed_backward(dx: Tensor, dout: Tensor, x: Tensor, act: str, config: Config) -> None:
    """Gradient of `packed`, packed in the same way."""
    dout, x = as_rows(dout), as_rows(x)
    m, n = dout.shape
    layout = (2 * n, dout.stride(0), x.stride(0), x.stride(0), n)
    _launch_backward(dx, dx, dout, x, x, (m, n), layout, act, config)


def _launch_backward(
    dgate: Tensor,
    dup: Tensor | None,
    dout: Tensor,
    gate: Tensor,
    up: Tensor | None,
    shape: tuple[int, int],
    layout: tuple[int, int, int, int, int],
    act: str,
    config: Config,
    options: Options = PLAIN,
) -> None:
    """`layout`: row strides of the gradients, dout, gate and up, and the offset of the second half."""
    m, n = shape
    units, layout, tail, unit = _in_units(m, n, layout, gate.itemsize)
    parameters = (dgate, dup, dout, gate, up, units, m, *layout, tail, *options)
    _backward(
        grid_of(triton.cdiv(n, config.block), m),
        parameters,
        (act, config.block, unit, tail > 0),
        num_warps=config.num_warps,
    )


TUNING = {"configure": configure, "config_type": Config, "configs": CONFIGS, "candidates": candidates}


def _options(args: swiglu.SwigluArgs | swiglu.SwigluBackwardArgs) -> Options:
    multiplier = float(args.gate_multiplier)
    return Options(None if multiplier == 1.0 else multiplier, float(args.limit) or None)


@register_kernel(swiglu.FORWARD, **TUNING)
def launch_swiglu(outs: tuple[Tensor], args: swiglu.SwigluArgs, config: Config) -> None:
    split(outs[0], args.gate, args.up, "silu", config, _options(args))


@register_kernel(swiglu.BACKWARD, **TUNING)
def launch_swiglu_backward(outs: tuple[Tensor, Tensor], args: swiglu.SwigluBackwardArgs, config: Config) -> None:
    split_backward(*outs, args.dout, args.gate, args.up, "silu", config, _options(args))


@register_kernel(geglu.FORWARD, **TUNING)
def launch_geglu(outs: tuple[Tensor], args: geglu.GegluArgs, config: Config) -> None:
    split(outs[0], args.gate, args.up, GELU[args.approximate], config)


@register_kernel(geglu.BACKWARD, **TUNING)
def launch_geglu_backward(outs: tuple[Tensor, Tensor], args: geglu.GegluBackwardArgs, config: Config) -> None:
    split_backward(*outs, args.dout, args.gate, args.up, GELU[args.approximate], config)


@register_kernel(silu_and_mul.FORWARD, **TUNING)
def launch_silu_and_mul(outs: tuple[Tensor], args: silu_and_mul.SiluAndMulArgs, config: Config) -> None:
    packed(outs[0], args.x, "silu", config)


@register_kernel(silu_and_mul.BACKWARD, **TUNING)
def launch_silu_and_mul_backward(
    outs: tuple[Tensor], args: silu_and_mul.SiluAndMulBackwardArgs, config: Config
) -> None:
    packed_backward(outs[0], args.dout, args.x, "silu", config)


@register_kernel(gelu_and_mul.FORWARD, **TUNING)
def launch_gelu_and_mul(outs: tuple[Tensor], args: gelu_and_mul.GeluAndMulArgs, config: Config) -> None:
    packed(outs[0], args.x, GELU[args.approximate], config)


@register_kernel(gelu_and_mul.BACKWARD, **TUNING)
def launch_gelu_and_mul_backward(
    outs: tuple[Tensor], args: gelu_and_mul.GeluAndMulBackwardArgs, config: Config
) -> None:
    packed_backward(outs[0], args.dout, args.x, GELU[args.approximate], config)
