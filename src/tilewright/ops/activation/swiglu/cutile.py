"""swiglu in cuTile: the split form of the kernels in `gated/cutile.py`, with idea, traffic and configurations."""

from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.activation.gated import cutile as gated
from tilewright.ops.activation.gated.cutile import CONFIGS, Config, candidates, configure


@register_impl(
    "swiglu", backend="cutile", configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates
)
def launch(outs: tuple[Tensor], gate: Tensor, up: Tensor, *, config: Config) -> None:
    gated.split(outs[0], gate, up, config)


@register_impl(
    "swiglu",
    backend="cutile",
    direction="bwd",
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
)
def launch_backward(outs: tuple[Tensor, Tensor], dout: Tensor, gate: Tensor, up: Tensor, *, config: Config) -> None:
    gated.split_backward(*outs, dout, gate, up, config)
