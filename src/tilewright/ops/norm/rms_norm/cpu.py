"""RMSNorm on a CPU: compiles and calls `rms_norm.cpp`, which `add_rms_norm` shares.

Traffic: reads x once, writes y once; the second walk along a row finds it in the L1 or L2 cache.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.jit.host_launch import HostKernel
from tilewright.ops.rows import as_rows


class Params(NamedTuple):
    """Of the template: T dtype of x, W of weight, Y of y."""

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
    """y = norm(x), or norm(x + residual) with the sum left in `total`."""
    rows, weight = as_rows(x), weight.contiguous()
    other = None if residual is None else as_rows(residual)
    m, n = rows.shape
    stride = 0 if other is None else other.stride(0)
    params = Params(x.dtype, weight.dtype, y.dtype, other is not None, fp32_weight)
    _kernel((y, total, rows, other, weight, m, n, rows.stride(0), stride, eps, offset), params)


@register_impl("rms_norm", backend="cpu")
def launch(
    outs: tuple[Tensor], x: Tensor, weight: Tensor, eps: float, offset: float, fp32_weight: bool, *, config: None
) -> None:
    run_forward(outs[0], None, x, None, weight, eps, offset, fp32_weight)
