"""RMSNorm on a CPU: compiles and calls `rms_norm.cpp`, which `add_rms_norm` shares.

Traffic: reads x once, writes y once; the second pass over a row finds it in the L1 or L2 cache.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.jit.host_launch import HostKernel
from tilewright.ops.rows import as_rows


class Params(NamedTuple):
    """Template parameters.   T, W, Y: dtypes of x, weight and y."""

    T: torch.dtype
    W: torch.dtype
    Y: torch.dtype
    kAdd: bool
    kFp32Weight: bool


_kernel = HostKernel(Path(__file__).with_name("rms_norm.cpp"), "rms_norm", "PPPPPqqqqff")


def run_forward(
    y: Tensor,
    total: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    offset: float,
    fp32_weight: bool,
) -> None:
    """Normalise x into y.  With a residual: normalise total = x + residual, and write total."""
    x_rows, weight = as_rows(x), weight.contiguous()
    residual_rows = None if residual is None else as_rows(residual)
    m, n = x_rows.shape
    stride_r = 0 if residual_rows is None else residual_rows.stride(0)
    params = Params(x.dtype, weight.dtype, y.dtype, residual_rows is not None, fp32_weight)
    _kernel((y, total, x_rows, residual_rows, weight, m, n, x_rows.stride(0), stride_r, eps, offset), params)


@register_impl("rms_norm", backend="cpu")
def launch(
    outs: tuple[Tensor], x: Tensor, weight: Tensor, eps: float, offset: float, fp32_weight: bool, *, config: None
) -> None:
    run_forward(outs[0], None, x, None, weight, eps, offset, fp32_weight)
