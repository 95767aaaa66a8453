"""matmul in CUDA C++ for Hopper: a batch of one for the engines of `engines/hopper_cuda.py`."""

from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.gemm.engines.hopper_cuda import CONFIGS, Config, candidates, configure, gemm, refusal


@register_impl(
    "matmul",
    backend="cuda",
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    supports=refusal,
)
def launch(outs, a, b, bias, c, scale, alpha, activation, out_dtype, *, config: Config) -> None:
    def batched(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.unsqueeze(0)

    gemm(batched(outs[0]), batched(a), batched(b), bias, batched(c), scale, alpha, activation, config)
