"""swiglu on a CPU: the split form of the kernel in `gated/gated.cpp`."""

from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.activation.gated import cpu as gated


@register_impl("swiglu", backend="cpu")
def launch(outs: tuple[Tensor], gate: Tensor, up: Tensor, *, config: None) -> None:
    gated.split(outs[0], gate, up, "silu")
