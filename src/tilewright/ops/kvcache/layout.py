"""Where tokens lie in a KV cache: slot arithmetic in plain torch, and the reads and writes that references use.

A cache is (pages, page_size, H, D).  Token p of sequence b lies in page `block_table[b, p // page_size]`, at place
`p % page_size`; without a table the pages are the sequences, and page_size is their capacity.  New tokens are packed:
the last of sequence b's new ones has position `lengths[b] - 1`.

Nothing here reads on the host or has a shape that depends on data, so it can be captured and compiled.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.ops.quant import numbers


class Slots(NamedTuple):
    """Places of tokens in a cache; all of one shape, (T,) for packed tokens, (B, S) for whole sequences.

    page, place  int64, in range also where nothing lies
    position     of the token in its sequence, int64; negative for a token that is none
    live         is it a token of a sequence, at a position from 0?
    stored       live, and its page and place are in the cache
    """

    page: Tensor
    place: Tensor
    position: Tensor
    live: Tensor
    stored: Tensor


def token_slots(
    cache: Tensor, tokens: int, lengths: Tensor, block_table: Tensor | None, cu_seqlens: Tensor | None
) -> Slots:
    """Slots of `tokens` packed new tokens; see `kv_append_` for what is padding."""
    token = torch.arange(tokens, device=cache.device)
    batch = lengths.shape[0]
    if batch == 0 or tokens == 0:
        zeros = torch.zeros_like(token)
        return Slots(zeros, zeros, zeros - 1, zeros.bool(), zeros.bool())
    if cu_seqlens is None:
        each = tokens // batch
        sequence, end = token // each, (token // each + 1) * each
        live = torch.ones_like(token, dtype=torch.bool)
    else:
        # No torch.searchsorted: before torch 2.13 Inductor loses the place where a slice of its boundaries begins
        sequence = (cu_seqlens[1:, None] <= token).sum(0)
        live = sequence < batch
        sequence = sequence.clamp(max=batch - 1)
        end = cu_seqlens[sequence + 1].long()
    position = torch.where(live, lengths[sequence].long() - end + token, -1)
    return _slots(cache, sequence, position, block_table)


def sequence_slots(cache: Tensor, lengths: Tensor, block_table: Tensor | None) -> Slots:
    """Slots (B, S) of all tokens of each sequence, S the most that the shapes allow."""
    longest = cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    position = torch.arange(longest, device=cache.device).expand(lengths.shape[0], longest)
    position = torch.where(position < lengths.long()[:, None], position, -1)
    sequence = torch.arange(lengths.shape[0], device=cache.device)[:, None].expand_as(position)
    return _slots(cache, sequence, position, block_table)


def _slots(cache: Tensor, sequence: Tensor, position: Tensor, block_table: Tensor | None) -> Slots:
    pages, page_size = cache.shape[:2]
    live = position >= 0
    if pages == 0 or page_size == 0 or (block_table is not None and block_table.shape[1] == 0):
        zeros = torch.zeros_like(position)
        return Slots(zeros, zeros, position, live, torch.zeros_like(live))
    at_least_0 = position.clamp(min=0)
    if block_table is None:
        page, place = sequence, at_least_0
        stored = live & (place < page_size)
    else:
        block, place = at_least_0 // page_size, at_least_0 % page_size
        page = block_table[sequence, block.clamp(max=block_table.shape[1] - 1)].long()
        stored = live & (block < block_table.shape[1]) & (page >= 0) & (page < pages)
    return Slots(page.clamp(0, pages - 1), place.clamp(max=page_size - 1), position, live, stored)


def read(cache: Tensor, slots: Slots, scale: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Values (*slots, H, D) in `dtype`, by default the cache's, times their scale; 0 where nothing is stored."""
    if cache.shape[0] == 0 or cache.shape[1] == 0:
        return cache.new_zeros((*slots.page.shape, *cache.shape[2:]), dtype=dtype or cache.dtype)
    values = as_bytes(cache)[slots.page, slots.place].view(cache.dtype)
    if scale is not None:
        x_fp32 = values.to(torch.float64 if cache.dtype == torch.float64 else torch.float32)
        values = x_fp32 * (scale if scale.dim() == 1 else scale[slots.page, slots.place])[..., None]
    return torch.where(slots.stored[..., None, None], values.to(dtype or values.dtype), 0)


def write(cache: Tensor, slots: Slots, values: Tensor) -> None:
    """Put `values` (T, ...) into the slots (T,) that are stored; no other element of the cache changes.

    Shapes must not depend on data.  So a token that is not stored repeats the write of the first that is; where none
    is, all write what a slot holds already.
    """
    if slots.page.numel() == 0 or cache.shape[0] == 0 or cache.shape[1] == 0:
        return
    first = slots.stored.to(torch.int8).argmax()
    source = torch.where(slots.stored, torch.arange(slots.page.shape[0], device=cache.device), first)
    page, place = slots.page[source], slots.place[source]
    target, rows = as_bytes(cache), as_bytes(values.to(cache.dtype))[source]
    old = target[page[:1], place[:1]]
    target.index_put_((page, place), torch.where(slots.stored.any(), rows, old))


def copy_pages(cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """cache[dst] = cache[src]; a pair outside of the cache repeats the first that is inside, as in `write`."""
    pages = cache.shape[0]
    if src.numel() == 0 or pages == 0:
        return
    inside = (src >= 0) & (dst >= 0) & (src < pages) & (dst < pages)
    first = inside.to(torch.int8).argmax()
    source = torch.where(inside, torch.arange(src.shape[0], device=cache.device), first)
    page, target = dst[source].clamp(0, pages - 1).long(), as_bytes(cache)
    copied = target[src[source].clamp(0, pages - 1).long()]
    target.index_put_((page,), torch.where(inside.any(), copied, target[page[:1]]))


def as_bytes(t: Tensor) -> Tensor:
    """An e4m3 tensor as bytes, which torch indexes on every device; another stays."""
    return t.view(torch.uint8) if t.dtype == numbers.E4M3 else t


def quantise_heads(x: Tensor, scale: Tensor) -> Tensor:
    """x (T, H, D) / scale (H,) in e4m3, what is beyond +-448 as +-448; float64 is not rounded."""
    x_fp32 = x if x.dtype == torch.float64 else x.to(torch.float32)
    scaled = (x_fp32 * (1.0 / scale)[:, None]).clamp(-numbers.E4M3_MAX, numbers.E4M3_MAX)
    return scaled if scaled.dtype == torch.float64 else scaled.to(numbers.E4M3)


def append(cache: Tensor, slots: Slots, x: Tensor, scale: Tensor | None) -> None:
    """Write x (T, H, D) into the cache; as e4m3 by scales of heads, or by those of tokens, which are written too."""
    if scale is None:
        write(cache, slots, x)
    elif scale.dim() == 1:
        write(cache, slots, quantise_heads(x, scale))
    else:
        amax = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
        scales = numbers.scale_of(amax)
        write(cache, slots, numbers.quantise(x, scales[..., None]))
        write(scale, slots, scales)
