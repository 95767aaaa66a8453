"""bmm in cuTile: the engine `tile_cutile`, whose tiles are numbered through all matrices of the batch."""

import torch
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.gemm.engines import tile_cutile
from tilewright.ops.gemm.engines.tile_cutile import CONFIGS, Config, gemm, refusal


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """As for one matrix, the first number of the bucket being the batch."""
    return tile_cutile.configure(bucket[1:], dtype)


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """As for one matrix."""
    return tile_cutile.candidates(bucket[1:], dtype)


@register_impl(
    "bmm",
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
    gemm(outs[0], a, b, bias, c, scale, alpha, activation, config)
