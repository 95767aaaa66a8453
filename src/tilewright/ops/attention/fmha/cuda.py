"""fmha in CUDA C++ for Hopper, forward: `engines/fmha_cuda.py`."""

from typing import Any

from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.attention.engines import fmha_cuda
from tilewright.ops.attention.fmha import raw


def _supports(*args: Any) -> str | None:
    q, _, v, *_ = args
    bucket = dict(zip(raw.BUCKET, raw.bucket(*args), strict=True))
    if not bucket["S_k"]:
        return "has no keys to read"
    if not bucket["aligned"]:
        return "needs addresses and strides of q, k and v that are multiples of 16 bytes"
    return fmha_cuda.refusal(q, v)


@register_impl(
    "fmha",
    backend="cuda",
    configure=fmha_cuda.configure,
    config_type=fmha_cuda.Config,
    configs=fmha_cuda.CONFIGS,
    candidates=fmha_cuda.candidates,
    supports=_supports,
)
def launch(outs: tuple[Tensor, Tensor], *args: Any, config: fmha_cuda.Config) -> None:
    """See `raw.FORWARD`."""
    fmha_cuda.forward(*outs, *args, config)
