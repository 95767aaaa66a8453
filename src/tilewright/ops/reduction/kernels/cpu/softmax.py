"""Softmax on a CPU: compiles and calls `softmax.cpp`.

Traffic: reads x once and writes y once; the passes after the first find the row in the caches.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.compilers.kernel_args import I64, Pointer
from tilewright.jit.host_launch import HostKernel
from tilewright.ops.reduction.softmax import FORWARD, SoftmaxArgs
from tilewright.ops.rows import as_rows


class Params(NamedTuple):
    """Template parameters.   T: dtype of x and y."""

    T: torch.dtype


class Args(NamedTuple):
    y: Pointer
    x: Pointer
    m: I64
    n: I64
    stride_x: I64


_kernel = HostKernel(Path(__file__).with_name("softmax.cpp"), "softmax", Args)


@register_kernel(FORWARD)
def launch(outs: tuple[Tensor], args: SoftmaxArgs, config: None) -> None:
    rows = as_rows(args.x)
    m, n = rows.shape
    _kernel(Args(outs[0], rows, m, n, rows.stride(0)), Params(rows.dtype))
