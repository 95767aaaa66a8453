"""Residual add and RMSNorm in cuTile: the RMSNorm kernel with a second input and output (see `rms_norm/cutile.py`).

Traffic: forward reads x and residual, writes y and the sum, 8*M*N bytes at bf16: 8192x4096 cannot beat 64 us at 4.2
TB/s.  Backward: reads dy, dsum and the sum, writes one gradient, 8*M*N.
"""

from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.norm.kernels.cutile.rms_norm import (
    BACKWARD_CONFIGS,
    CONFIGS,
    Config,
    PersistentConfig,
    candidates,
    candidates_backward,
    configure,
    configure_backward,
    run_backward,
    run_forward,
)
from tilewright.ops.rows import no_float64


@register_impl(
    "add_rms_norm",
    backend="cutile",
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    supports=no_float64,
)
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
    backend="cutile",
    direction="bwd",
    configure=configure_backward,
    config_type=PersistentConfig,
    configs=BACKWARD_CONFIGS,
    candidates=candidates_backward,
    supports=no_float64,
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
    config: PersistentConfig,
) -> None:
    run_backward(outs[0], outs[1], dy, dtotal, total, weight, eps, offset, fp32_weight, need_dweight, config)
