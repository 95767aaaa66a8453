"""group_gemm in Triton: `engines/problems_triton.py`."""

import torch
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.gemm.kernels.triton import group_gemm as engine


@register_impl(
    "group_gemm",
    backend="triton",
    configure=engine.configure,
    config_type=engine.Config,
    configs=engine.CONFIGS,
    candidates=engine.candidates,
)
def launch(
    outs: tuple[Tensor],
    a: Tensor,
    b: Tensor,
    more_a: list[Tensor],
    more_b: list[Tensor],
    out_dtype: torch.dtype,
    *,
    config: engine.Config,
) -> None:
    engine.gemm(outs[0], (a, *more_a), (b, *more_b), config)
