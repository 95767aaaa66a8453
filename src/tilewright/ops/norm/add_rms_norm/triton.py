"""Residual add and RMSNorm in Triton: the RMSNorm kernel with a second input and output (see `rms_norm/triton.py`).

Traffic: forward reads x and residual, writes y and the sum, 8*M*N bytes at bf16: 8192x4096 cannot beat 64 us at 4.2
TB/s. The two kernels of a model without fusion move 10*M*N.  Backward: reads dy, dsum and the sum, writes one gradient,
8*M*N.
"""

from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.norm.rms_norm.triton import (
    BACKWARD_CONFIGS,
    FORWARD_CONFIGS,
    Config,
    configure,
    configure_backward,
    run_backward,
    run_forward,
)


@register_impl("add_rms_norm", backend="triton", configure=configure, config_type=Config, configs=FORWARD_CONFIGS)
def launch(
    outs: tuple[Tensor, Tensor],
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    fp32_weight: bool,
    *,
    config: Config,
) -> None:
    run_forward(outs[0], outs[1], x, residual, weight, eps, offset, fp32_weight, config)


@register_impl(
    "add_rms_norm",
    backend="triton",
    direction="bwd",
    configure=configure_backward,
    config_type=Config,
    configs=BACKWARD_CONFIGS,
)
def launch_backward(
    outs: tuple[Tensor, Tensor],
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    fp32_weight: bool,
    need_dweight: bool,
    *,
    config: Config,
) -> None:
    run_backward(outs[0], outs[1], dy, dtotal, total, weight, eps, offset, fp32_weight, need_dweight, config)
