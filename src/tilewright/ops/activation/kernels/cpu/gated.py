"""Gated activations on a CPU: compiles and calls `gated.cpp`, for packed and for split tensors.

Traffic: reads gate and up once, writes one tensor of their size.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.jit.host_launch import HostKernel
from tilewright.ops.rows import as_rows

GELU = {"tanh": "gelu_tanh", "none": "gelu"}


class Params(NamedTuple):
    """Template parameters.   T: dtype of all tensors.   Act: name of a struct in `gated.cpp`."""

    T: torch.dtype
    Act: str


_kernel = HostKernel(Path(__file__).with_name("gated.cpp"), "gated", "PPPqqqqq")


def split(out: Tensor, gate: Tensor, up: Tensor, act: str) -> None:
    """out = act(gate) * up.   gate, up: (..., N)."""
    if gate.is_contiguous() and up.is_contiguous():
        _kernel((out, gate, up, 1, gate.numel(), 0, 0, 0), Params(gate.dtype, act))
        return
    gate, up = as_rows(gate), as_rows(up)
    _kernel((out, gate, up, *gate.shape, gate.stride(0), up.stride(0), 0), Params(gate.dtype, act))


def packed(out: Tensor, x: Tensor, act: str) -> None:
    """out = act(x[..., :N]) * x[..., N:].   x: (..., 2N)."""
    x = as_rows(x)
    m, n, stride = x.shape[0], x.shape[1] // 2, x.stride(0)
    _kernel((out, x, x, m, n, stride, stride, n), Params(x.dtype, act))
