"""swiglu in Triton: the split form of the kernels in `gated/triton.py`, with idea, traffic and configurations."""

from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.activation.gated import triton as gated
from tilewright.ops.activation.gated.triton import CONFIGS, Config, candidates, configure


@register_impl(
    "swiglu", backend="triton", configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates
)
def launch(outs: tuple[Tensor], gate: Tensor, up: Tensor, *, config: Config) -> None:
    gated.split(outs[0], gate, up, "silu", config)


@register_impl(
    "swiglu",
    backend="triton",
    direction="bwd",
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
)
def launch_backward(outs: tuple[Tensor, Tensor], dout: Tensor, gate: Tensor, up: Tensor, *, config: Config) -> None:
    gated.split_backward(*outs, dout, gate, up, "silu", config)
