"""Squared ReLU in Triton, by the kernels of `gated` with another activation and, alone, without an up.

Traffic alone: forward 4*M*N bytes at bf16, so 8192x24576 cannot beat 192 us at 4.2 TB/s; backward reads dout and x and
writes one gradient, 6*M*N, 288 us.  As a gate: what `gated` moves.
"""

from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.ops.activation import relu2
from tilewright.ops.activation.kernels.triton.gated import TUNING, Config, split, split_backward


@register_kernel(relu2.FORWARD, **TUNING)
def launch(outs: tuple[Tensor], args: relu2.Relu2Args, config: Config) -> None:
    split(outs[0], args.x, args.up, "relu2", config)


@register_kernel(relu2.BACKWARD, **TUNING)
def launch_backward(outs: tuple[Tensor, Tensor], args: relu2.Relu2BackwardArgs, config: Config) -> None:
    dx, dup = outs
    split_backward(dx, None if args.up is None else dup, args.dout, args.x, args.up, "relu2", config)
