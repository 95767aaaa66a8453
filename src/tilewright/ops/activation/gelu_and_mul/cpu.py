"""gelu_and_mul on a CPU: the packed form of the kernel in `gated/gated.cpp`."""

from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.activation.gated import cpu as gated


@register_impl("gelu_and_mul", backend="cpu")
def launch(outs: tuple[Tensor], x: Tensor, approximate: str, *, config: None) -> None:
    gated.packed(outs[0], x, gated.GELU[approximate])
