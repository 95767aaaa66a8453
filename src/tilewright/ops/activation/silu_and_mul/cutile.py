"""silu_and_mul in cuTile: packed form of the kernels in `gated/cutile.py`, with idea, traffic and configurations."""

from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.activation.gated import cutile as gated
from tilewright.ops.activation.gated.cutile import CONFIGS, Config, candidates, configure


@register_impl(
    "silu_and_mul", backend="cutile", configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates
)
def launch(outs: tuple[Tensor], x: Tensor, *, config: Config) -> None:
    gated.packed(outs[0], x, config)


@register_impl(
    "silu_and_mul",
    backend="cutile",
    direction="bwd",
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
)
def launch_backward(outs: tuple[Tensor], dout: Tensor, x: Tensor, *, config: Config) -> None:
    gated.packed_backward(outs[0], dout, x, config)
