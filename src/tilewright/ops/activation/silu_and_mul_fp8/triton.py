"""silu_and_mul_fp8 in Triton: packed form of the kernel in `swiglu_fp8/triton.py`, with idea, traffic and
configurations.
"""

from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.activation.swiglu_fp8.triton import SIZES, Config, candidates, configure, packed


@register_impl(
    "silu_and_mul_fp8", backend="triton", configure=configure, config_type=Config, configs=SIZES, candidates=candidates
)
def launch(outs: tuple[Tensor, Tensor], x: Tensor, ue8m0: bool, *, config: Config) -> None:
    packed(*outs, x, ue8m0, config)
