"""The slot of each packed token, and a tile of heads written to its slots, in Triton: `layout.py` on the device.

A program needs the sequence of each of its tokens.  It counts the ends in cu_seqlens that are not behind the token: one
load of up to BLOCK_B ends, where a binary search would make log2(B) loads that wait for one another.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.quant.kernels.triton.numbers import encode, inverse, magnitude, scale_of

MAX_BLOCK_B = 256
E4M3_MAX = tl.constexpr(448.0)


class Table(NamedTuple):
    """Run-time arguments of a kernel that finds slots: what and how many there are."""

    lengths: Tensor  # (B,)
    cu_seqlens: Tensor | None  # (B + 1,)
    block_table: Tensor | None  # (B, max_pages)
    B: int
    new: int  # tokens a sequence, without cu_seqlens
    table_b: int
    table_p: int
    max_pages: int
    pages: int
    page_size: int


def table(
    cache: Tensor, tokens: int, lengths: Tensor, block_table: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Table, int]:
    """The arguments, and BLOCK_B."""
    batch = lengths.shape[0]
    strides = (0, 0) if block_table is None else block_table.stride()
    max_pages = 1 if block_table is None else block_table.shape[1]
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    new = max(tokens // batch, 1) if batch else 1
    sizes = (max_pages, cache.shape[0], cache.shape[1])
    block_b = min(triton.next_power_of_2(max(batch, 1)), MAX_BLOCK_B) if cu_seqlens is not None else 1
    return Table(lengths.contiguous(), cu_seqlens, block_table, batch, new, *strides, *sizes), block_b


def strides(cache: Tensor, x: Tensor, scale: Tensor | None) -> tuple[int, ...]:
    """Strides of a cache, of packed tokens, and of scales of tokens."""
    return (*cache.stride(), *x.stride(), *(scale.stride() if scale is not None and scale.dim() == 3 else (0, 0, 0)))


def scale_kind(scale: Tensor | None) -> int:
    """0: none, 1: of heads, 2: of tokens."""
    return 0 if scale is None else 1 if scale.dim() == 1 else 2


@triton.jit
def token_position(token, T, lengths, cu_seqlens, B, new, BLOCK_B: tl.constexpr):
    """(sequence, position, live) of packed tokens (TOKENS,); live: of a sequence, at a position from 0."""
    if cu_seqlens is not None:
        sequence = tl.zeros_like(token)
        for start in range(0, B, BLOCK_B):
            offs = start + tl.arange(0, BLOCK_B)
            ends = tl.load(cu_seqlens + 1 + offs, mask=offs < B, other=2147483647)
            sequence += tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), 1)
        live = (token < T) & (sequence < B)
        end = tl.load(cu_seqlens + 1 + sequence, mask=live, other=0)
    else:
        sequence = token // new
        live = (token < T) & (sequence < B)
        end = (sequence + 1) * new
    position = tl.load(lengths + sequence, mask=live, other=0) - end + token
    return sequence, position, live & (position >= 0)


@triton.jit
def token_slot(sequence, position, live, block_table, table_b, table_p, max_pages, pages, page_size):
    """(page, place, stored) of tokens; what `stored` excludes has no slot in the cache."""
    if block_table is not None:
        block = position // page_size
        stored = live & (block < max_pages)
        page = tl.load(block_table + sequence.to(tl.int64) * table_b + block * table_p, mask=stored, other=0)
        place = position - block * page_size
    else:
        page, place = sequence, position
        stored = live & (position < page_size)
    return page.to(tl.int64), place.to(tl.int64), stored & (page >= 0) & (page < pages)


@triton.jit
def head_scale(size, scale, scale_pointers, mask, KIND: tl.constexpr):
    """The factor of each head of each token before rounding to e4m3: from `scale` (H,), or from the largest magnitude
    `size` (TOKENS, HEADS), whose scale is stored.
    """
    if KIND == 1:
        factor = inverse(tl.load(scale, mask=mask, other=1.0))
    else:
        computed = scale_of(size, False)
        tl.store(scale_pointers, computed, mask=mask)
        factor = inverse(computed)
    return factor


@triton.jit
def as_e4m3(x, factor, cache, KIND: tl.constexpr):
    """x (float32) times factor, for a store through `cache`; scales of heads do not bound it: +-448 does, NaN stays."""
    y = x * factor
    if KIND == 1:
        y = tl.where(y > E4M3_MAX, E4M3_MAX, tl.where(y < -E4M3_MAX, -E4M3_MAX, y))
    return encode(y, cache)


@triton.jit
def store_heads(
    cache, x, scale, token, page, place, stored, group, H,  # token, page, place, stored: (TOKENS,)
    cache_p, cache_s, cache_h, cache_d, x_t, x_h, x_d, scale_p, scale_s, scale_h,  # strides
    D: tl.constexpr, KIND: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy HEADS heads of packed tokens to their slots, in e4m3 where there are scales."""
    h = (group * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    head_mask = stored[:, None] & (h < H)[None, :]
    offs = tl.arange(0, BLOCK_D).to(tl.int64)[None, None, :]
    mask = head_mask[:, :, None] & (offs < D)
    row = token.to(tl.int64)[:, None] * x_t + h[None, :] * x_h  # (TOKENS, HEADS)
    values = tl.load(x + row[:, :, None] + offs * x_d, mask=mask, other=0.0)
    slot = page[:, None] * cache_p + place[:, None] * cache_s + h[None, :] * cache_h
    pointers = cache + slot[:, :, None] + offs * cache_d
    if KIND == 0:
        tl.store(pointers, values, mask=mask)
    else:
        scale_pointers = scale + page[:, None] * scale_p + place[:, None] * scale_s + h[None, :] * scale_h
        heads = scale + h[None, :] + tl.zeros_like(row)
        size = tl.max(magnitude(values), 2)
        factor = head_scale(size, heads, scale_pointers, head_mask, KIND)
        tl.store(pointers, as_e4m3(values.to(tl.float32), factor[:, :, None], cache, KIND), mask=mask)
