"""Residual add and RMSNorm on a CPU: the kernel of `rms_norm/rms_norm.cpp` with a second input and output."""

from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.norm.kernels.cpu.rms_norm import run_forward


@register_impl("add_rms_norm", backend="cpu")
def launch(
    outs: tuple[Tensor, Tensor],
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    fp32_weight: bool,
    *,
    config: None,
) -> None:
    run_forward(outs[0], outs[1], x, residual, weight, eps, offset, fp32_weight)
