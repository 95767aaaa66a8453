"""SiLU gates in cuTile: one kernel forward, one backward, for swiglu and silu_and_mul.

A tile is BLOCK neighbouring elements of one row; packed halves are two views of one tensor, and contiguous split
tensors count as one long row.
Traffic: forward 6*M*N bytes at bf16, so 8192x14336 cannot beat 168 us at 4.2 TB/s; backward reads dout, gate and up and
writes two gradients, 10*M*N, 280 us.  The backward recomputes silu(gate): nothing is saved but the inputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.cutile_language import ct
from tilewright.jit.cutile_launch import CutileKernel, Hints
from tilewright.ops.activation import silu_and_mul, swiglu
from tilewright.ops.rows import PlainRowsBucket, RowsBucket, as_rows

FILL = 512  # minimum tiles before tiles grow: about four for each SM of an H200
LOG2E = 1.4426950408889634
_INT32_MAX = 2**31 - 1


class Config(NamedTuple):
    block: int
    num_warps: int = 4  # 4 or 8
    occupancy: int = 0  # blocks per SM; 0: tileiras chooses


def _tiles(dtype: torch.dtype) -> list[Config]:
    """Tiles of one 16-byte vector a thread and tensor, or of half of one, largest first."""
    return [Config(32 * 4 * bytes_ // dtype.itemsize) for bytes_ in (16, 8)]


def configure(bucket: RowsBucket | PlainRowsBucket, dtype: torch.dtype) -> Config:
    """The largest tile that still gives every SM work; latency decides small problems."""
    tiles, elements = _tiles(dtype), bucket.M * bucket.N
    return next((c for c in tiles if elements >= FILL * c.block), tiles[-1])


CONFIGS = tuple(dict.fromkeys((*_tiles(torch.bfloat16), *_tiles(torch.float32))))


def candidates(bucket: RowsBucket | PlainRowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Configurations with half a vector to four vectors a thread and tensor."""
    return tuple(
        Config(32 * warps * bytes_ // dtype.itemsize, warps, occupancy)
        for warps in (4, 8)
        for bytes_ in (8, 16, 32, 64)
        for occupancy in (0, 8)
        if bytes_ * occupancy <= 256  # more spills
    )


def _silu(g, PRECISE):
    """silu(g) and its derivative in float32, from e^-|g|: no overflow, and no cancellation in 1 - sigmoid."""
    if PRECISE:
        e = ct.exp(-abs(g))
        large = 1.0 / (1.0 + e)
    else:
        e = ct.exp2(abs(g) * -LOG2E, flush_to_zero=True)
        large = ct.truediv(1.0, 1.0 + e, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    small = e * large
    s = ct.where(g >= 0, large, small)
    act = g * s
    return act, s + act * ct.where(g >= 0, small, large)


def _gated_kernel(
    out, gate, up,  # (M, N) each, by stride
    BLOCK: ct.Constant[int], EXACT: ct.Constant[bool],
):  # fmt: skip  # EXACT: nothing needs a mask
    """out = silu(gate) * up, one tile a block."""
    # Load a tile of gate and up
    blocks = ct.cdiv(gate.shape[1], BLOCK)
    row_idx = ct.bid(0) // blocks
    index = (row_idx, ct.bid(0) % blocks * BLOCK + ct.arange(BLOCK, dtype=ct.int32))
    g = ct.gather(gate, index, check_bounds=not EXACT)
    u = ct.gather(up, index, check_bounds=not EXACT).astype(ct.float32)
    # Compute and store out
    act, _ = _silu(g.astype(ct.float32), gate.dtype == ct.float32)
    # round act to the input's dtype before the product, as the models do
    out_fp32 = act.astype(gate.dtype).astype(ct.float32) * u
    ct.scatter(out, index, out_fp32.astype(out.dtype), check_bounds=not EXACT)


def _gated_backward_kernel(
    dgate, dup, dout, gate, up,  # (M, N) each, by stride
    BLOCK: ct.Constant[int], EXACT: ct.Constant[bool],
):  # fmt: skip
    """dgate = dout * up * silu'(gate) and dup = dout * silu(gate), elementwise, one tile a block."""
    # Load a tile of gate, up and dout
    blocks = ct.cdiv(gate.shape[1], BLOCK)
    row_idx = ct.bid(0) // blocks
    index = (row_idx, ct.bid(0) % blocks * BLOCK + ct.arange(BLOCK, dtype=ct.int32))
    g = ct.gather(gate, index, check_bounds=not EXACT).astype(ct.float32)
    u = ct.gather(up, index, check_bounds=not EXACT).astype(ct.float32)
    d = ct.gather(dout, index, check_bounds=not EXACT).astype(ct.float32)
    # Recompute the activation
    act, slope = _silu(g, gate.dtype == ct.float32)
    # Compute and store dgate and dup; autograd rounds the gradient of act(gate) to the input's dtype
    dact = (d * u).astype(gate.dtype).astype(ct.float32)
    ct.scatter(dgate, index, (dact * slope).astype(dgate.dtype), check_bounds=not EXACT)
    act = act.astype(gate.dtype).astype(ct.float32)
    ct.scatter(dup, index, (d * act).astype(dup.dtype), check_bounds=not EXACT)


_forward = CutileKernel(_gated_kernel)
_backward = CutileKernel(_gated_backward_kernel)


def split(out: Tensor, gate: Tensor, up: Tensor, config: Config) -> None:
    """out = silu(gate) * up.   gate, up: (..., N)."""
    _launch(_forward, (out, gate, up), config)


def split_backward(dgate: Tensor, dup: Tensor, dout: Tensor, gate: Tensor, up: Tensor, config: Config) -> None:
    """Gradients of `split`.   dout: (..., N)."""
    _launch(_backward, (dgate, dup, dout, gate, up), config)


def packed(out: Tensor, x: Tensor, config: Config) -> None:
    """out = silu(x[..., :N]) * x[..., N:].   x: (..., 2N)."""
    _launch(_forward, (out, *_halves(as_rows(x))), config)


def packed_backward(dx: Tensor, dout: Tensor, x: Tensor, config: Config) -> None:
    """Gradient of `packed`, packed in the same way."""
    _launch(_backward, (*_halves(as_rows(dx)), dout, *_halves(as_rows(x))), config)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    n = x.shape[1] // 2
    return x[:, :n], x[:, n:]


def _launch(kernel: CutileKernel, tensors: tuple[Tensor, ...], config: Config) -> None:
    if all(t.is_contiguous() for t in tensors) and tensors[0].numel() <= _INT32_MAX:
        tensors = tuple(t.view(1, -1) for t in tensors)
    else:
        tensors = tuple(as_rows(t) for t in tensors)
    m, n = tensors[0].shape
    grid = (m * -(-n // config.block),)
    constants = (config.block, n % config.block == 0)
    kernel(grid, tensors, constants, Hints(config.num_warps, config.occupancy or None))


_TUNING = {"configure": configure, "config_type": Config, "configs": CONFIGS, "candidates": candidates}


@register_kernel(swiglu.FORWARD, why_not=swiglu.only_plain, **_TUNING)
def launch_swiglu(outs: tuple[Tensor], args: swiglu.SwigluArgs, config: Config) -> None:
    split(outs[0], args.gate, args.up, config)


@register_kernel(swiglu.BACKWARD, why_not=swiglu.only_plain, **_TUNING)
def launch_swiglu_backward(outs: tuple[Tensor, Tensor], args: swiglu.SwigluBackwardArgs, config: Config) -> None:
    split_backward(*outs, args.dout, args.gate, args.up, config)


@register_kernel(silu_and_mul.FORWARD, **_TUNING)
def launch_silu_and_mul(outs: tuple[Tensor], args: silu_and_mul.SiluAndMulArgs, config: Config) -> None:
    packed(outs[0], args.x, config)


@register_kernel(silu_and_mul.BACKWARD, **_TUNING)
def launch_silu_and_mul_backward(
    outs: tuple[Tensor], args: silu_and_mul.SiluAndMulBackwardArgs, config: Config
) -> None:
    packed_backward(outs[0], args.dout, args.x, config)
