"""fmha in CUDA C++ for Hopper: `engines/fmha_cuda.py`, `engines/fmha_backward_cuda.py`."""

from typing import Any

from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.attention.engines import fmha_backward_cuda, fmha_cuda
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


def _supports_backward(do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> str | None:
    bucket = dict(zip(raw.BUCKET, raw.BACKWARD.bucket(do, dlse, q, k, v, *rest), strict=True))
    if bucket["mask"] == raw.PROGRAM:
        return "has causal masks and windows backward; others are programs, which triton evaluates"
    if not bucket["S_k"]:
        return "has no keys to read"
    if not bucket["aligned"]:
        return "needs addresses and strides of q, k, v and do that are multiples of 16 bytes"
    return fmha_backward_cuda.refusal(q, v)


@register_impl(
    "fmha",
    backend="cuda",
    direction="bwd",
    configure=fmha_backward_cuda.configure,
    config_type=fmha_backward_cuda.Config,
    configs=fmha_backward_cuda.CONFIGS,
    candidates=fmha_backward_cuda.candidates,
    supports=_supports_backward,
)
def launch_backward(outs: tuple[Tensor, Tensor, Tensor, Tensor], *args: Any, config: fmha_backward_cuda.Config) -> None:
    """See `raw.BACKWARD`."""
    fmha_backward_cuda.backward(*outs, *args, config)
