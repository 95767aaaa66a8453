"""fmha_varlen in CUDA C++ for Hopper, forward: the kernel of `fmha`; its backward has bands alone."""

from typing import Any

from tilewright.dispatch import register_impl
from tilewright.ops.attention.engines import fmha_cuda
from tilewright.ops.attention.fmha import cuda as fmha
from tilewright.ops.attention.fmha.raw import unaddressable
from tilewright.ops.attention.fmha_varlen.raw import FORWARD


def _supports(*args: Any) -> str | None:
    return unaddressable(FORWARD.bucket_of(args, "default")) or fmha_cuda.refusal(args[0], args[2])


launch = register_impl(
    "fmha_varlen",
    backend="cuda",
    configure=fmha_cuda.configure,
    config_type=fmha_cuda.Config,
    configs=fmha_cuda.CONFIGS,
    candidates=fmha_cuda.candidates,
    supports=_supports,
)(fmha.launch)
