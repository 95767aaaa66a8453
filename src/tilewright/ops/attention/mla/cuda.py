"""mla in CUDA C++ for Hopper, forward: the kernel of `fmha` with two more operands (`engines/fmha_cuda.py`).

q with q_pe and k with k_pe are joined in shared memory only.  At DeepSeek's widths the flops are 1.25 times those of
D = 128, 2560 cycles of the tensor cores for a tile of 128 queries and keys, with as many exponentials.
"""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.attention.fmha.raw import BUCKET as OF_FMHA
from tilewright.ops.attention.kernels.sm90 import forward as fmha_cuda
from tilewright.ops.attention.kernels.sm90.forward import Config
from tilewright.ops.attention.mla.raw import BUCKET, FORWARD, of_fmha

_LATENT = (Config(2, 128, 2, 1, turns=False), Config(2, 128, 2, 1), Config(2, 112, 2, 1), Config(2, 96, 2, 2))
"""Tiles for 129 to 192 columns of q and k and at most 128 of v, as in DeepSeek: 128 keys are the most that fit."""

CONFIGS = tuple(dict.fromkeys((*_LATENT, *fmha_cuda.CONFIGS)))
"""Every config that `configure` and `candidates` can return."""


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Tiles that fit the registers and shared memory at these widths."""
    sizes = dict(zip(BUCKET, bucket, strict=True))
    width = fmha_cuda.columns(sizes["D"], sizes["D_pe"])
    if 128 < width <= 192 and sizes["D_v"] <= 128:
        return _LATENT
    fmha_sizes = dict(zip(OF_FMHA, of_fmha(bucket), strict=True)) | {"D": width}
    return fmha_cuda.candidates(tuple(fmha_sizes.values()), dtype)


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """The tile by widths and kind of mask; batch and length are ignored, so that results do not depend on them."""
    return candidates(bucket, dtype)[0]


def why_not(q: Tensor, q_pe: Tensor, k: Tensor, k_pe: Tensor, v: Tensor, *rest: Any) -> str | None:
    sizes = dict(zip(BUCKET, FORWARD.bucket_of((q, q_pe, k, k_pe, v, *rest), "default"), strict=True))
    if not sizes["S_k"]:
        return "has no keys to read"
    if not sizes["aligned"]:
        return "needs addresses and strides of q, q_pe, k, k_pe and v that are multiples of 16 bytes"
    return fmha_cuda.why_not(q, v, q_pe.shape[3])


@register_impl(
    "mla",
    backend="cuda",
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
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
    fmha_cuda.forward(*outs, q, k, v, None, None, mask_data, *rest, 0.0, config, pe=(q_pe, k_pe))
