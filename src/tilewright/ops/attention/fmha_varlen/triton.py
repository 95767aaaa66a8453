"""fmha_varlen in Triton, both directions: the kernels of `fmha`, which skip the tiles that no sequence shares."""

from tilewright.dispatch import register_impl
from tilewright.ops.attention.fmha import triton as fmha
from tilewright.ops.attention.kernels.triton import backward as triton_backward
from tilewright.ops.attention.kernels.triton import forward as triton_forward
from tilewright.ops.attention.kernels.triton.tiles import Config

launch = register_impl(
    "fmha_varlen",
    backend="triton",
    configure=triton_forward.configure,
    config_type=Config,
    configs=triton_forward.CONFIGS,
    candidates=triton_forward.candidates,
    supports=triton_forward.why_not,
)(fmha.launch)

launch_backward = register_impl(
    "fmha_varlen",
    backend="triton",
    direction="bwd",
    configure=triton_backward.configure,
    config_type=triton_backward.Config,
    configs=triton_backward.CONFIGS,
    candidates=triton_backward.candidates,
    supports=triton_backward.why_not,
)(fmha.launch_backward)
