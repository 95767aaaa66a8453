"""RMSNorm on a CPU: compiles and calls `rms_norm.cpp`.  Serves rms_norm and add_rms_norm.

Traffic: reads x once, writes y once; the second pass over a row finds it in the L1 or L2 cache.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.compilers.kernel_args import F32, I64, Pointer
from tilewright.jit.host_launch import HostKernel
from tilewright.ops.norm import add_rms_norm, rms_norm
from tilewright.ops.norm.add_rms_norm import AddRmsNormArgs
from tilewright.ops.norm.rms_norm import RmsNormArgs
from tilewright.ops.rows import as_rows, contiguous


class Params(NamedTuple):
    """Template parameters.   T, W, Y: dtypes of x, weight and y; W is T without a weight."""

    T: torch.dtype
    W: torch.dtype
    Y: torch.dtype
    kAdd: bool
    kWeight: bool
    kFp32Weight: bool


class Args(NamedTuple):
    y: Pointer
    total: Pointer
    x: Pointer
    residual: Pointer
    weight: Pointer
    m: I64
    n: I64
    stride_x: I64
    stride_r: I64
    eps: F32
    offset: F32


_kernel = HostKernel(Path(__file__).with_name("rms_norm.cpp"), "rms_norm", Args)


def _launch(y: Tensor, total: Tensor | None, residual: Tensor | None, args: RmsNormArgs | AddRmsNormArgs) -> None:
    """Normalise x into y.  With a residual: normalise total = x + residual, and write total."""
    x, weight = as_rows(args.x), contiguous(args.weight)
    residual = None if residual is None else as_rows(residual)
    m, n = x.shape
    stride_r = 0 if residual is None else residual.stride(0)
    dtypes = x.dtype, x.dtype if weight is None else weight.dtype, y.dtype
    params = Params(*dtypes, residual is not None, weight is not None, args.fp32_weight)
    _kernel(Args(y, total, x, residual, weight, m, n, x.stride(0), stride_r, args.eps, args.offset), params)


@register_kernel(rms_norm.FORWARD)
def launch(outs: tuple[Tensor], args: RmsNormArgs, config: None) -> None:
    (y,) = outs
    _launch(y, None, None, args)


@register_kernel(add_rms_norm.FORWARD)
def launch_add(outs: tuple[Tensor, Tensor], args: AddRmsNormArgs, config: None) -> None:
    y, total = outs
    _launch(y, total, args.residual, args)
