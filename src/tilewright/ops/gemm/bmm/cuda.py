"""bmm in CUDA C++ for Hopper: the batch is the outermost index of a tile."""

import torch

from tilewright.dispatch import register_impl
from tilewright.ops.gemm.engines import hopper_cuda
from tilewright.ops.gemm.engines.hopper_cuda import CONFIGS, Config, gemm, refusal


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    return hopper_cuda.configure(bucket[1:], dtype, bucket[0])


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    return hopper_cuda.candidates(bucket[1:], dtype, bucket[0])


@register_impl(
    "bmm",
    backend="cuda",
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    supports=refusal,
)
def launch(outs, a, b, bias, c, scale, alpha, activation, out_dtype, *, config: Config) -> None:
    gemm(outs[0], a, b, bias, c, scale, alpha, activation, config)
