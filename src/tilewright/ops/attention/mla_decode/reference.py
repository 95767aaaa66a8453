"""Latent attention over a KV cache in plain torch, from the raw arguments: the oracle on float64, and on other types
the rounding points that kernels share.

Every new token gathers its keys; blocks of tokens keep the copies small.  Nothing is read on the host.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch.bucket import hint
from tilewright.ops.attention.mla_decode.args import MlaDecodeArgs
from tilewright.ops.kvcache.mla_layout import dequantize_mla_cache
from tilewright.ops.rows import accumulate_dtype

_BLOCK = 1 << 26
"""Elements of keys gathered at once: 256 MiB in float32."""


class Keys(NamedTuple):
    """Keys of tokens start .. end, all (tokens, keys): where each one lies, in range also where none is seen."""

    page: Tensor
    place: Tensor
    visible: Tensor


def keys_of(args: MlaDecodeArgs, start: int, end: int) -> Keys:
    """The keys of tokens start .. end of T = B * S_q.  No entry of a table behind a length is followed."""
    (batch, each), (pages, page_size) = args.q.shape[:2], args.kv_cache.shape[:2]
    device = args.q.device
    token = torch.arange(start, end, device=device)
    sequence = token // each
    column = torch.arange(args.capacity if hint(pages) else 0, device=device)
    length = None if args.lengths is None else args.lengths.long()[sequence][:, None]
    if args.indices is not None:
        slot = args.indices.view(batch * each, -1)[start:end, : column.shape[0]].long()
        visible = (slot >= 0) & (slot < pages * page_size)
        if length is not None:
            visible = visible & (column < length)
        slot = torch.where(visible, slot, 0)
        return Keys(slot // page_size, slot % page_size, visible)
    assert length is not None
    visible = column < length
    if args.causal:
        visible = visible & (column <= length - each + (token % each)[:, None])
    if args.block_table is None:
        page = sequence[:, None].expand_as(visible)
    else:
        page = args.block_table.long()[sequence].repeat_interleave(page_size, 1)[:, : column.shape[0]]
    return Keys(torch.where(visible, page, 0), (column % page_size).expand_as(visible), visible)


def gathered(args: MlaDecodeArgs, keys: Keys) -> Tensor:
    """(tokens, keys, D) in q's dtype; 0 where a token sees nothing."""
    if not hint(keys.page.shape[1]):
        return args.q.new_empty((*keys.page.shape, args.q.shape[3]))
    rows = args.kv_cache[keys.page, keys.place]
    values = dequantize_mla_cache(rows, args.q.dtype) if args.is_packed else rows
    return torch.where(keys.visible[..., None], values, 0.0)


def attention(args: MlaDecodeArgs) -> tuple[Tensor, Tensor]:
    """(o, lse) for the raw arguments: (B, S_q, H, d_v) and (B, S_q, H)."""
    q, d_v, acc_dtype = args.q, args.d_v, accumulate_dtype(args.q.dtype)
    batch, each, heads, d = q.shape
    queries = q.reshape(batch * each, heads, d)
    outs, logs = [], []
    for start, end in _blocks(args):
        keys = keys_of(args, start, end)
        kv = gathered(args, keys).to(acc_dtype)
        s = args.scale * (queries[start:end].to(acc_dtype) @ kv.transpose(1, 2))
        s = s.masked_fill(~keys.visible[:, None], -math.inf)
        row_max = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -math.inf)
        sink = None if args.sinks is None else args.sinks.to(acc_dtype)[:, None]
        if sink is not None:
            row_max = torch.maximum(row_max, sink)
        row_max = row_max.masked_fill(row_max == -math.inf, 0.0)  # a row that sees no key: its terms are exp(-inf) = 0
        p = torch.exp(s - row_max)
        l_i = p.sum(-1, keepdim=True)
        if sink is not None:
            l_i = l_i + torch.exp(sink - row_max)
        acc = p.to(q.dtype).to(acc_dtype) @ kv[..., :d_v]
        outs.append((acc / l_i.masked_fill(l_i == 0, 1.0)).to(q.dtype))
        logs.append((row_max + torch.log(l_i))[..., 0])
    if not outs:
        return q.new_empty(batch, each, heads, d_v), q.new_empty((batch, each, heads), dtype=acc_dtype)
    return torch.cat(outs).view(batch, each, heads, d_v), torch.cat(logs).view(batch, each, heads)


def _blocks(args: MlaDecodeArgs) -> list[tuple[int, int]]:
    """Tokens start .. end of which the gathered keys are few; all of them where nothing is computed."""
    count = args.q.shape[0] * args.q.shape[1]
    a_token = hint(args.capacity) * hint(args.q.shape[3])
    if args.q.is_meta or a_token * hint(count) <= _BLOCK:
        return [(0, count)] if hint(count) else []
    height = max(_BLOCK // a_token, 1)
    return [(start, min(start + height, count)) for start in range(0, count, height)]
