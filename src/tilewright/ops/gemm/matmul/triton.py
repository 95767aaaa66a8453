"""Triton: the tile engine on one product; a batch of one."""

import torch
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.gemm.engines.tile_triton import CONFIGS, Config, candidates, configure, gemm, refusal


@register_impl(
    "matmul",
    backend="triton",
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    supports=refusal,
)
def launch(
    outs: tuple[Tensor],
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    scale: Tensor | None,
    alpha: float,
    activation: str,
    out_dtype: torch.dtype,
    *,
    config: Config,
) -> None:
    rows = None if c is None else c.unsqueeze(0)
    gemm(outs[0].unsqueeze(0), a.unsqueeze(0), b.unsqueeze(0), bias, rows, scale, alpha, activation, config)
