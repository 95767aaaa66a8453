"""fmha_varlen in CUDA C++ for Hopper, both directions: the kernels of `fmha`."""

from typing import Any

from tilewright.dispatch import register_impl
from tilewright.ops.attention.fmha import cuda as fmha
from tilewright.ops.attention.fmha.raw import why_not_addressable
from tilewright.ops.attention.fmha_varlen.raw import FORWARD
from tilewright.ops.attention.kernels.sm90 import backward as fmha_backward_cuda
from tilewright.ops.attention.kernels.sm90 import forward as fmha_cuda


def _why_not(*args: Any) -> str | None:
    return why_not_addressable(FORWARD.bucket_of(args, "default")) or fmha_cuda.why_not(args[0], args[2])


launch = register_impl(
    "fmha_varlen",
    backend="cuda",
    configure=fmha_cuda.configure,
    config_type=fmha_cuda.Config,
    configs=fmha_cuda.CONFIGS,
    candidates=fmha_cuda.candidates,
    supports=_why_not,
)(fmha.launch)

launch_backward = register_impl(
    "fmha_varlen",
    backend="cuda",
    direction="bwd",
    configure=fmha_backward_cuda.configure,
    config_type=fmha_backward_cuda.Config,
    configs=fmha_backward_cuda.CONFIGS,
    candidates=fmha_backward_cuda.candidates,
    supports=fmha.why_not_backward,
)(fmha.launch_backward)
