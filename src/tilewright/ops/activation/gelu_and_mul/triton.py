"""gelu_and_mul in Triton: packed form of the kernels in `gated/triton.py`, with idea, traffic and configurations."""

from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.activation.gated import triton as gated
from tilewright.ops.activation.gated.triton import CONFIGS, Config, candidates, configure


@register_impl(
    "gelu_and_mul", backend="triton", configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates
)
def launch(outs: tuple[Tensor], x: Tensor, approximate: str, *, config: Config) -> None:
    gated.packed(outs[0], x, gated.GELU[approximate], config)


@register_impl(
    "gelu_and_mul",
    backend="triton",
    direction="bwd",
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
)
def launch_backward(outs: tuple[Tensor], dout: Tensor, x: Tensor, approximate: str, *, config: Config) -> None:
    gated.packed_backward(outs[0], dout, x, gated.GELU[approximate], config)
