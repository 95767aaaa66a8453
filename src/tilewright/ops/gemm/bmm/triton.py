"""Triton: the tile engine on a batch, whose size is a run-time value."""

import torch
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.gemm.engines import tile_triton
from tilewright.ops.gemm.engines.tile_triton import CONFIGS, Config, refusal


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """What one of the products would get: a batch fills the GPU, but only the caller knows by how much."""
    return tile_triton.configure(bucket[1:], dtype)


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """What one of the products may try."""
    return tile_triton.candidates(bucket[1:], dtype)


@register_impl(
    "bmm",
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
    tile_triton.gemm(outs[0], a, b, bias, c, scale, alpha, activation, config)
