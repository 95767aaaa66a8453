"""The attention of the decode step on a GPU: `ops.fmha_decode`, over a cache whose rows have positions of their own."""

from typing import Any

import torch

from tilewright.generate.attention.dense import check
from tilewright.ops.attention.fmha_decode import fmha_decode


def split_kv(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one query token, which reads only the slots that hold tokens.

    query: (B, H, 1, D) bf16|fp16|fp32   key, value: (B, H_kv, capacity, D), a layer's whole storage, possibly a ring
    attention_mask: lengths (B, 1, 1, 1) int32   -> (B, 1, H, D_v)
    A soft cap is not applied, as by transformers' SDPA: `split_kv_scores` does.
    """
    check(query, key, kwargs)
    return _attend(query, key, value, attention_mask, scaling)


def split_kv_scores(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`split_kv` of a model that runs `ops.fmha` for its soft cap or its sinks, s_aux: (H,)."""
    check(query, key, kwargs)
    return _attend(query, key, value, attention_mask, scaling, softcap=softcap or None, sinks=s_aux)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    q = query[:, :, 0].to(key.dtype)
    o = fmha_decode(q, key.transpose(1, 2), value.transpose(1, 2), lengths.flatten(), scale=scaling, **options)
    assert isinstance(o, torch.Tensor)
    return o[:, None], None
