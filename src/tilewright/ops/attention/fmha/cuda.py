"""fmha in CUDA C++ for Hopper: `engines/fmha_cuda.py`, `engines/fmha_backward_cuda.py`."""

from typing import Any

from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.attention.fmha import raw
from tilewright.ops.attention.kernels.sm90 import backward as fmha_backward_cuda
from tilewright.ops.attention.kernels.sm90 import forward as fmha_cuda


def _why_not(*args: Any) -> str | None:
    bucket = raw.FORWARD.bucket_of(args, "default")
    return raw.why_not_addressable(bucket) or fmha_cuda.why_not(args[0], args[2])


@register_impl(
    "fmha",
    backend="cuda",
    configure=fmha_cuda.configure,
    config_type=fmha_cuda.Config,
    configs=fmha_cuda.CONFIGS,
    candidates=fmha_cuda.candidates,
    supports=_why_not,
)
def launch(outs: tuple[Tensor, Tensor], *args: Any, config: fmha_cuda.Config) -> None:
    """See `raw.FORWARD`."""
    fmha_cuda.forward(*outs, *args, config)


def why_not_backward(*args: Any) -> str | None:
    """For `raw.BACKWARD`, also under another name."""
    bucket = raw.BACKWARD.bucket_of(args, "default")
    return (
        raw.why_not_interval(bucket) or raw.why_not_addressable(bucket) or fmha_backward_cuda.why_not(args[2], args[4])
    )


@register_impl(
    "fmha",
    backend="cuda",
    direction="bwd",
    configure=fmha_backward_cuda.configure,
    config_type=fmha_backward_cuda.Config,
    configs=fmha_backward_cuda.CONFIGS,
    candidates=fmha_backward_cuda.candidates,
    supports=why_not_backward,
)
def launch_backward(outs: tuple[Tensor, Tensor, Tensor, Tensor], *args: Any, config: fmha_backward_cuda.Config) -> None:
    """See `raw.BACKWARD`."""
    fmha_backward_cuda.backward(*outs, *args, config)
