"""mla in CUDA C++ for Hopper, forward: the kernel of `fmha` with two more operands (`engines/fmha_cuda.py`).

q beside q_pe and k beside k_pe are put together in shared memory alone.  The products of DeepSeek's widths are 1.25
times those of D = 128, 2560 cycles of the tensor cores for a tile of 128 queries and keys, with as many exponentials.
"""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.attention.engines import fmha_cuda
from tilewright.ops.attention.engines.fmha_cuda import Config
from tilewright.ops.attention.fmha.raw import BUCKET as OF_FMHA
from tilewright.ops.attention.mla.raw import BUCKET, FORWARD, of_fmha

_LATENT = (Config(2, 128, 2, 1, turns=False), Config(2, 128, 2, 1), Config(2, 112, 2, 1), Config(2, 96, 2, 2))
"""Of 129 to 192 columns over at most 128 of values, as DeepSeek has them: 128 keys are the most that fit."""

CONFIGS = tuple(dict.fromkeys((*_LATENT, *fmha_cuda.CONFIGS)))
"""Every config that `configure` and `candidates` can return."""


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Tiles that fit the registers and shared memory at these widths."""
    of = dict(zip(BUCKET, bucket, strict=True))
    width = fmha_cuda.columns(of["D"], of["D_pe"])
    if 128 < width <= 192 and of["D_v"] <= 128:
        return _LATENT
    found = dict(zip(OF_FMHA, of_fmha(bucket), strict=True)) | {"D": width}
    return fmha_cuda.candidates(tuple(found.values()), dtype)


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """By widths and the kind of mask alone, so that a result does not depend on batch or length."""
    return candidates(bucket, dtype)[0]


def supports(q: Tensor, q_pe: Tensor, k: Tensor, k_pe: Tensor, v: Tensor, *rest: Any) -> str | None:
    of = dict(zip(BUCKET, FORWARD.bucket_of((q, q_pe, k, k_pe, v, *rest), "default"), strict=True))
    if not of["S_k"]:
        return "has no keys to read"
    if not of["aligned"]:
        return "needs addresses and strides of q, q_pe, k, k_pe and v that are multiples of 16 bytes"
    return fmha_cuda.refusal(q, v, q_pe.shape[3])


@register_impl(
    "mla",
    backend="cuda",
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    supports=supports,
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
