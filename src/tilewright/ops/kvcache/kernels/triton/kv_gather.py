"""Tokens of a KV cache as packed tensors in Triton: `kv_append`, read the other way.

A program moves a few heads of K or of V of a few tokens from their slots, and multiplies what is stored in e4m3 by its
scale.

Traffic: at bf16 each element is read and written once, 8*T*H_kv*D bytes for K and V: T=8192, H_kv=8, D=128 cannot beat
16 us at 4.2 TB/s.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.kvcache.kernels.triton import slots
from tilewright.ops.kvcache.kernels.triton.kv_append import Config, tile
from tilewright.ops.kvcache.kernels.triton.slots import token_position, token_slot
from tilewright.ops.kvcache.kv_gather import FORWARD, KvGatherArgs, KvGatherBucket
from tilewright.ops.quant.kernels.triton.numbers import as_stored, decode
from tilewright.ops.rows import no_float64


def configure(bucket: KvGatherBucket, dtype: torch.dtype) -> Config:
    row_bytes = min(max(32, triton.next_power_of_2(bucket.D) * 2), 512)
    return tile(2 * bucket.T * bucket.H_kv, bucket.H_kv, row_bytes)


def candidates(bucket: KvGatherBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Configurations with 16 to 128 bytes of a 16-bit result a thread."""
    row_bytes = triton.next_power_of_2(bucket.D) * 2
    return tuple(
        Config(tokens, heads, warps)
        for warps in (1, 2, 4, 8)
        for heads in (1, 2, 4, 8)
        for tokens in (1, 2, 4, 8, 16, 32)
        if tokens <= bucket.T and heads <= triton.next_power_of_2(bucket.H_kv)
        if 16 <= tokens * heads * row_bytes // (32 * warps) <= 128
    )


CONFIGS = tuple(
    dict.fromkeys(
        configure(KvGatherBucket(t, h, d, 0), torch.bfloat16)
        for h, d in ((8, 128), (2, 16), (1, 64), (8, 256))
        for t in (1, 64, 256, 1024, 8192)
    )
)


@triton.jit
def _kv_gather_kernel(
    k, v, k_cache, v_cache, k_scale, v_scale,  # k, v: (T, H, D)   caches: (pages, page_size, H, D)
    lengths, cu_seqlens, block_table, B, new, table_b, table_p, max_pages, pages, page_size, T, H, groups,
    k_cache_p, k_cache_s, k_cache_h, k_cache_d, k_t, k_h, k_d, k_scale_p, k_scale_s, k_scale_h,
    v_cache_p, v_cache_s, v_cache_h, v_cache_d, v_t, v_h, v_d, v_scale_p, v_scale_s, v_scale_h,
    D: tl.constexpr, D_V: tl.constexpr, KIND: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    # Find the slots of a tile of tokens
    group = tl.program_id(0) % (2 * groups)
    token = tl.program_id(0) // (2 * groups) * TOKENS + tl.arange(0, TOKENS)
    sequence, position, live = token_position(token, T, lengths, cu_seqlens, B, new, BLOCK_B)
    page, place, stored = token_slot(
        sequence, position, live, block_table, table_b, table_p, max_pages, pages, page_size
    )  # fmt: skip
    # Copy heads of K, or of V
    if group < groups:
        _load_heads(
            k, k_cache, k_scale, token, page, place, stored, group, T, H,
            k_cache_p, k_cache_s, k_cache_h, k_cache_d, k_t, k_h, k_d, k_scale_p, k_scale_s, k_scale_h,
            D, KIND, HEADS, BLOCK_D,
        )  # fmt: skip
    else:
        _load_heads(
            v, v_cache, v_scale, token, page, place, stored, group - groups, T, H,
            v_cache_p, v_cache_s, v_cache_h, v_cache_d, v_t, v_h, v_d, v_scale_p, v_scale_s, v_scale_h,
            D_V, KIND, HEADS, BLOCK_DV,
        )  # fmt: skip


@triton.jit
def _load_heads(
    y, cache, scale, token, page, place, stored, group, T, H,  # token, page, place, stored: (TOKENS,)
    cache_p, cache_s, cache_h, cache_d, y_t, y_h, y_d, scale_p, scale_s, scale_h,  # strides
    D: tl.constexpr, KIND: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy HEADS heads of tokens from their slots; 0 where nothing is stored."""
    h = (group * HEADS + tl.arange(0, HEADS)).to(tl.int64)[None, :]
    t = token.to(tl.int64)[:, None]
    offs = tl.arange(0, BLOCK_D).to(tl.int64)[None, None, :]
    head_mask = stored[:, None] & (h < H)
    slot = page[:, None] * cache_p + place[:, None] * cache_s + h * cache_h
    mask = head_mask[:, :, None] & (offs < D)
    values = tl.load(cache + slot[:, :, None] + offs * cache_d, mask=mask)
    if KIND > 0:
        if KIND == 1:
            scales = scale + h + 0 * t
        else:
            scales = scale + page[:, None] * scale_p + place[:, None] * scale_s + h * scale_h
        values = decode(values) * tl.load(scales, mask=head_mask, other=0.0)[:, :, None]
    values = tl.where(mask, values.to(tl.float32), 0.0)
    row = t * y_t + h * y_h
    row_mask = ((t < T) & (h < H))[:, :, None] & (offs < D)
    tl.store(y + row[:, :, None] + offs * y_d, values.to(y.dtype.element_ty), mask=row_mask)


_kernel = TritonKernel(_kv_gather_kernel)


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=lambda args: no_float64(*args),
)
def launch(outs: tuple[Tensor, Tensor], args: KvGatherArgs, config: Config) -> None:
    (k, v), k_scale, v_scale = outs, args.k_scale, args.v_scale
    k_cache, v_cache = as_stored(args.k_cache), as_stored(args.v_cache)
    kind = slots.scale_kind(k_scale)
    if kind == 1:
        k_scale, v_scale = k_scale.contiguous(), v_scale.contiguous()
    (tokens, h, d), d_v = k.shape, v.shape[2]
    if not tokens:
        return
    table, block_b = slots.table(k_cache, tokens, args.lengths, args.block_table, args.cu_seqlens)
    groups = triton.cdiv(h, config.heads)
    tensors = (k, v, k_cache, v_cache, k_scale, v_scale)
    strides = (*slots.strides(k_cache, k, k_scale), *slots.strides(v_cache, v, v_scale))
    blocks = (triton.next_power_of_2(d), triton.next_power_of_2(d_v), block_b)
    constants = (d, d_v, kind, config.tokens, config.heads, *blocks)
    grid = (triton.cdiv(tokens, config.tokens) * 2 * groups,)
    _kernel(grid, (*tensors, *table, tokens, h, groups, *strides), constants, num_warps=config.num_warps)
