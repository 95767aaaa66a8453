"""Gated activations on a CPU, for swiglu, silu_and_mul and gelu_and_mul: compiles and calls `gated.cpp`.

Traffic: reads gate and up once, writes one tensor of their size.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.compilers.kernel_args import I64, Pointer
from tilewright.jit.host_launch import HostKernel
from tilewright.ops.activation import gelu_and_mul, silu_and_mul, swiglu
from tilewright.ops.rows import as_rows

GELU = {"tanh": "gelu_tanh", "none": "gelu"}


class Params(NamedTuple):
    """Template parameters.   T: dtype of all tensors.   Act: name of a struct in `gated.cpp`."""

    T: torch.dtype
    Act: str


class Args(NamedTuple):
    out: Pointer
    gate: Pointer
    up: Pointer
    m: I64
    n: I64
    stride_gate: I64
    stride_up: I64
    up_offset: I64


_kernel = HostKernel(Path(__file__).with_name("gated.cpp"), "gated", Args)


def split(out: Tensor, gate: Tensor, up: Tensor, act: str) -> None:
    """out = act(gate) * up.   gate, up: (..., N)."""
    if gate.is_contiguous() and up.is_contiguous():
        args = Args(out, gate, up, m=1, n=gate.numel(), stride_gate=0, stride_up=0, up_offset=0)
    else:
        gate, up = as_rows(gate), as_rows(up)
        m, n = gate.shape
        args = Args(out, gate, up, m, n, gate.stride(0), up.stride(0), up_offset=0)
    _kernel(args, Params(gate.dtype, act))


def packed(out: Tensor, x: Tensor, act: str) -> None:
    """out = act(x[..., :N]) * x[..., N:].   x: (..., 2N)."""
    x = as_rows(x)
    m, n = x.shape[0], x.shape[1] // 2
    args = Args(out, x, x, m, n, x.stride(0), x.stride(0), up_offset=n)
    _kernel(args, Params(x.dtype, act))


@register_kernel(swiglu.FORWARD, why_not=swiglu.only_plain)
def launch_swiglu(outs: tuple[Tensor], args: swiglu.SwigluArgs, config: None) -> None:
    split(outs[0], args.gate, args.up, "silu")


@register_kernel(silu_and_mul.FORWARD)
def launch_silu_and_mul(outs: tuple[Tensor], args: silu_and_mul.SiluAndMulArgs, config: None) -> None:
    packed(outs[0], args.x, "silu")


@register_kernel(gelu_and_mul.FORWARD)
def launch_gelu_and_mul(outs: tuple[Tensor], args: gelu_and_mul.GeluAndMulArgs, config: None) -> None:
    packed(outs[0], args.x, GELU[args.approximate])
