"""matmul in cuTile: a batch of one for the engine `tile_cutile`."""

import torch
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.gemm.engines.tile_cutile import CONFIGS, Config, candidates, configure, gemm, refusal


@register_impl(
    "matmul",
    backend="cutile",
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
    addend = None if c is None else c[None]
    gemm(outs[0][None], a[None], b[None], bias, addend, scale, alpha, activation, config)
