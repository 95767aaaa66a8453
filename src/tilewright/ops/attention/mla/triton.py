"""mla in Triton, both directions: the engines of fmha with a second pair of score operands.

q and q_pe, k and k_pe are never concatenated: the scores are the sum of two products, and k_pe is read once for all
heads that run together.  dk_pe is written per head in float32, 4 * B * H * S_k * D_pe bytes, then summed in a fixed
order.  A loop over the heads inside a key tile's program would need none of that memory, but leave S_k / 64 programs
per batch, too few for the GPU at the lengths of training.
"""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.jit.tape import scratch
from tilewright.ops.attention.fmha.raw import PROGRAM
from tilewright.ops.attention.kernels.triton import backward as triton_backward
from tilewright.ops.attention.kernels.triton import forward as triton_forward
from tilewright.ops.attention.kernels.triton.delta import delta
from tilewright.ops.attention.kernels.triton.head_sum import head_sum
from tilewright.ops.attention.kernels.triton.tiles import MOST_D, Config
from tilewright.ops.attention.mla.raw import BUCKET, of_fmha


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    return triton_forward.configure(of_fmha(bucket), dtype)


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    return triton_forward.candidates(of_fmha(bucket), dtype)


def why_not(q: Tensor, q_pe: Tensor, k: Tensor, k_pe: Tensor, v: Tensor, *_: object) -> str | None:
    if max(q.shape[3] + q_pe.shape[3], v.shape[3]) > MOST_D:
        return f"holds heads of up to {MOST_D} numbers, D + D_pe or D_v"
    return "has no keys to read" if k.shape[2] == 0 else None


@register_impl(
    "mla",
    backend="triton",
    configure=configure,
    config_type=Config,
    configs=triton_forward.CONFIGS,
    candidates=candidates,
    supports=why_not,
)
def launch(
    outs: tuple[Tensor, Tensor],
    q: Tensor,
    q_pe: Tensor,
    k: Tensor,
    k_pe: Tensor,
    v: Tensor,
    mask_data: Tensor | None,
    *rest: Any,
    config: Config,
) -> None:
    """See `raw.FORWARD`."""
    triton_forward.forward(*outs, q, k, v, None, None, mask_data, *rest, 0.0, config, pe=(q_pe, k_pe))


_KEYS = ((64, 64, 8, 2), (32, 128, 8, 2))
_QUERIES = ((128, 64, 8, 2), (64, 64, 8, 2))
"""Halves for DeepSeek's widths that compile without spills for sm_90, the first of each under every mask."""


def _latent(bucket: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Are keys of 129 to 192 numbers and values of at most 128 copied, in 16 bits?"""
    sizes = dict(zip(BUCKET, bucket, strict=True))
    return (
        128 < sizes["D"] + sizes["D_pe"] <= 192
        and sizes["D_v"] <= 128
        and bool(sizes["aligned"])
        and dtype.itemsize == 2
    )


def configure_backward(bucket: tuple[int, ...], dtype: torch.dtype) -> triton_backward.Config:
    if _latent(bucket, dtype):
        return triton_backward.Config(*_KEYS[0], *_QUERIES[0], True)
    return triton_backward.configure(of_fmha(bucket), dtype)


def candidates_backward(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[triton_backward.Config, ...]:
    if not _latent(bucket, dtype):
        return triton_backward.candidates(of_fmha(bucket), dtype)
    settled = _KEYS[:1] if bucket[BUCKET.index("mask")] == PROGRAM else _KEYS
    return tuple(triton_backward.Config(*k, *q, True) for k in settled for q in _QUERIES)


def why_not_backward(do: Tensor, dlse: Tensor | None, *rest: Any) -> str | None:
    return why_not(*rest)


@register_impl(
    "mla",
    backend="triton",
    direction="bwd",
    configure=configure_backward,
    config_type=triton_backward.Config,
    configs=(triton_backward.Config(*_KEYS[0], *_QUERIES[0], True), *triton_backward.CONFIGS),
    candidates=candidates_backward,
    supports=why_not_backward,
)
def launch_backward(
    outs: tuple[Tensor, ...],
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    q_pe: Tensor,
    k: Tensor,
    k_pe: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    mask_data: Tensor | None,
    *rest: Any,
    config: triton_backward.Config,
) -> None:
    """See `raw.BACKWARD`."""
    dq, dq_pe, dk, dk_pe, dv = outs
    row_delta = scratch(tuple(lse.shape), torch.float32, lse.device)
    dk_pe_per_head = scratch((*k.shape[:3], k_pe.shape[3]), torch.float32, k.device)
    delta(row_delta, do, o, dlse)
    pe = (dq_pe, dk_pe_per_head, q_pe, k_pe)
    triton_backward.backward(dq, dk, dv, do, row_delta, q, k, v, lse, None, None, mask_data, *rest, 0.0, config, pe=pe)
    head_sum(dk_pe, dk_pe_per_head)
