"""The attention function of the decode step on a GPU: the kernels of `ops/attention/kernels/triton/decode.py`."""

from typing import Any

import torch

from tilewright.errors import InputError
from tilewright.generate.attention.dense import check
from tilewright.ops.attention.kernels.triton.decode import MOST_D, decode


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
    """Attention of one query token in two launches, which read only the positions of the interval.

    query: (B, H, 1, D) bf16|fp16|fp32   key, value: (B, H_kv, capacity, D), a layer's whole storage, possibly a ring
    attention_mask: interval (B, 1, 1, 2) int64   -> (B, 1, H, D_v). D and D_v at most 256.
    """
    check(query, key, kwargs)
    d_k, d_v = key.shape[3], value.shape[3]
    if max(d_k, d_v) > MOST_D:
        raise InputError(
            f"split_kv takes head dimensions up to {MOST_D}, got {d_k} and {d_v}. "
            'Use StaticDecoder(model, attention="sdpa").'
        )
    return decode(query, key, value, attention_mask, d_k**-0.5 if scaling is None else scaling), None
