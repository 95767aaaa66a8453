"""Residual add and RMSNorm in Triton: the RMSNorm kernel with a second input and output (see `rms_norm/triton.py`).

Traffic: forward reads x and residual, writes y and the sum, 8*M*N bytes at bf16: 8192x4096 cannot beat 64 us at 4.2
TB/s. The two kernels of a model without fusion move 10*M*N.  Backward: reads dy, dsum and the sum, writes one gradient,
8*M*N.
"""

import torch
import triton
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.norm.kernels.triton.rms_norm import (
    Config,
    PersistentConfig,
    candidates,
    candidates_backward,
    configure_backward,
    every,
    run_backward,
    run_forward,
)
from tilewright.ops.norm.kernels.triton.rms_norm import configure as configure_plain


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    m, n = bucket
    block = triton.next_power_of_2(n)
    if m >= 1024 and 2048 <= block <= 8192:
        # 64 values a thread: with two inputs and two outputs few, deep warps win, 66.6 us against 68.4 with 8 warps
        # at 8192x4096, 258.9 against 262.8 at 32768x4096 (H200, 2026-11)
        return Config(rows=1, num_warps=block // 2048)
    return configure_plain(bucket, dtype)


@register_impl(
    "add_rms_norm",
    backend="triton",
    configure=configure,
    config_type=Config,
    configs=every(configure),
    candidates=candidates,
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
    backend="triton",
    direction="bwd",
    configure=configure_backward,
    config_type=PersistentConfig,
    configs=every(configure_backward),
    candidates=candidates_backward,
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
