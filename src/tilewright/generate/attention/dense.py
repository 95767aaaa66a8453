"""Attention of one query token over the visible slots, in plain torch.

Both forms take the H / H_kv query heads that share a key head as the rows of one small matrix, so that no expanded
copy of the cache is made: at batch 1, 32 heads over 8, D 128 and context 2048 such a copy would be 33 MB a layer, four
times what must be read.

Traffic: K and V once, 2 * B * H_kv * slots * D values; everything else is smaller by D.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from tilewright.errors import InputError


def sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`scaled_dot_product_attention` with the query heads of a group as its rows; one call, fp32 inside.

    query: (B, H, 1, D)   key, value: (B, H_kv, slots, D)   attention_mask: additive (B, 1, 1, slots)   -> (B, 1, H, D)
    """
    batch, heads, kv_heads = check(query, key, kwargs)
    rows = query.reshape(batch, kv_heads, heads // kv_heads, query.shape[-1])
    out = scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, 1, heads, value.shape[-1]), None


def grouped(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`sdpa` as two batched products around a softmax, five launches; scores stay in fp32 on a GPU.

    Shapes as in `sdpa`. The second product has B * H_kv output tiles and as many busy SMs, unless cuBLAS splits it.
    """
    batch, heads, kv_heads = check(query, key, kwargs)
    group, dim = heads // kv_heads, query.shape[-1]
    rows = query.reshape(batch * kv_heads, group, dim)
    columns = key.flatten(0, 1).transpose(1, 2)  # a view: the batch and head strides merge
    half = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    scores = torch.bmm(rows, columns, out_dtype=torch.float32) if half else torch.bmm(rows, columns)
    scores = scores.view(batch, kv_heads, group, -1)
    scores = torch.add(attention_mask, scores, alpha=dim**-0.5 if scaling is None else scaling)
    weights = torch.softmax(scores, dim=-1).to(value.dtype)
    out = torch.bmm(weights.flatten(0, 1), value.flatten(0, 1))
    return out.view(batch, 1, heads, value.shape[-1]), None


def check(query: torch.Tensor, key: torch.Tensor, extras: dict[str, Any]) -> tuple[int, int, int]:
    """(B, H, H_kv); raises InputError for inputs that a one-token step over plain keys cannot have."""
    if query.shape[2] != 1:
        raise InputError(f"a decode step attends with one token a row, got {query.shape[2]}")
    unsupported = [name for name in ("position_bias", "s_aux") if extras.get(name) is not None]
    if unsupported:
        raise InputError(
            f"the model passes {', '.join(unsupported)} to its attention, which the decode attention does not apply. "
            'Use StaticDecoder(model, attention="model").'
        )
    return query.shape[0], query.shape[1], key.shape[1]
