"""Attention over a KV cache in plain torch, from the raw arguments: the oracle on float64, and on other types the
rounding points that kernels share.

Every new token gathers the keys of its sequence; blocks of tokens keep the copies small.  Nothing is read on the host.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch.bucket import hint
from tilewright.ops.attention.paged.args import PagedArgs
from tilewright.ops.quant.numbers import E4M3
from tilewright.ops.rows import accumulate_dtype

_BLOCK = 1 << 26
"""Elements of keys and values gathered at once: 256 MiB in float32."""


class Tokens(NamedTuple):
    """The sequence of each new token (0 behind the last one), its position, and the length of its sequence."""

    sequence: Tensor
    position: Tensor
    length: Tensor


def tokens_of(args: PagedArgs) -> Tokens:
    """Each (T,) int64.  A token behind the last sequence belongs to one without keys."""
    count, batch, lengths = args.q.shape[0], args.lengths.shape[0], args.lengths.long()
    numbers = torch.arange(count, device=args.q.device)
    if args.cu_seqlens is None:
        each = count // max(batch, 1)
        sequence = numbers // max(each, 1)
        length = lengths[sequence]
        return Tokens(sequence, length - each + numbers % max(each, 1), length)
    cu = args.cu_seqlens.long()
    sequence = (cu[1:, None] <= numbers).sum(0)
    is_padding = sequence >= batch
    sequence = torch.where(is_padding, 0, sequence)
    if not batch:
        return Tokens(sequence, sequence - 1, torch.zeros_like(sequence))
    length = torch.where(is_padding, 0, lengths[sequence])
    return Tokens(sequence, torch.where(is_padding, -1, length - cu[1:][sequence] + numbers), length)


def gathered(cache: Tensor, scale: Tensor | None, args: PagedArgs, sequence: Tensor, visible: Tensor) -> Tensor:
    """(tokens, keys, H_kv, D) in the accumulation dtype: the keys of each token's sequence, 0 where it sees none.

    visible: (tokens, keys).  No other entry of the table is followed, so it may hold anything.
    """
    page_size, acc_dtype = cache.shape[1], accumulate_dtype(args.q.dtype)
    keys = torch.arange(visible.shape[1], device=cache.device)
    if not hint(keys.shape[0]):
        return cache.new_empty((*visible.shape, *cache.shape[2:]), dtype=acc_dtype)
    if args.block_table is None:
        pages = sequence[:, None].expand_as(visible)
    else:
        pages = args.block_table.long()[sequence].repeat_interleave(page_size, 1)
    pages, slots = torch.where(visible, pages, 0), (keys % page_size).expand_as(visible)
    values = cache[pages, slots].to(acc_dtype)
    if scale is not None:
        values = values * (scale if scale.dim() == 1 else scale[pages, slots])[..., None].to(acc_dtype)
    return torch.where(visible[..., None, None], values, 0.0)


def attention(args: PagedArgs) -> tuple[Tensor, Tensor]:
    """(o, lse) for the raw arguments: (T, H, D_v) and (T, H)."""
    q, k, v = args.q, args.k_cache, args.v_cache
    (count, heads, d), (pages, _, kv_heads, d_v), acc_dtype = q.shape, v.shape, accumulate_dtype(q.dtype)
    has_keys = hint(pages) and hint(args.lengths.shape[0])
    keys = torch.arange(args.capacity if has_keys else 0, device=q.device)
    tokens = tokens_of(args)
    rounded = q.dtype if v.dtype == E4M3 else v.dtype  # of probabilities
    outs, logs = [], []
    for start, end in _blocks(args, d + d_v):
        sequence, position, length = (t[start:end] for t in tokens)
        visible = keys < length[:, None]
        if args.causal:
            visible = visible & (keys <= position[:, None])
        if args.left >= 0:
            visible = visible & (keys >= position[:, None] - args.left)
        rows = q[start:end].to(acc_dtype).reshape(end - start, kv_heads, heads // kv_heads, d)
        s = args.scale * (rows @ gathered(k, args.k_scale, args, sequence, visible).permute(0, 2, 3, 1))
        if args.softcap:
            s = args.softcap * torch.tanh(s / args.softcap)
        s = s.masked_fill(~visible[:, None, None], -math.inf)
        row_max = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -math.inf)
        sink = None
        if args.sinks is not None:
            sink = args.sinks.to(acc_dtype).view(kv_heads, heads // kv_heads, 1)
            row_max = torch.maximum(row_max, sink)
        row_max = row_max.masked_fill(row_max == -math.inf, 0.0)  # a row that sees no key: its terms are exp(-inf) = 0
        p = torch.exp(s - row_max)
        l_i = p.sum(-1, keepdim=True)
        if sink is not None:
            l_i = l_i + torch.exp(sink - row_max)
        acc = p.to(rounded).to(acc_dtype) @ gathered(v, args.v_scale, args, sequence, visible).transpose(1, 2)
        outs.append((acc / l_i.masked_fill(l_i == 0, 1.0)).to(q.dtype).reshape(end - start, heads, d_v))
        logs.append((row_max + torch.log(l_i)).reshape(end - start, heads))
    if not outs:
        return q.new_empty(count, heads, d_v), q.new_empty((count, heads), dtype=acc_dtype)
    return torch.cat(outs), torch.cat(logs)


def _blocks(args: PagedArgs, width: int) -> list[tuple[int, int]]:
    """Tokens start .. end of which the gathered keys and values are few; all of them where nothing is computed."""
    count = args.q.shape[0]
    a_token = hint(args.capacity) * hint(args.k_cache.shape[2]) * width
    if args.q.is_meta or a_token * hint(count) <= _BLOCK:
        return [(0, count)] if hint(count) else []
    height = max(_BLOCK // a_token, 1)
    return [(start, min(start + height, count)) for start in range(0, count, height)]
