"""QK-norm, rotary embedding and the write into a KV cache in Triton, one launch for q, k and v.

A program takes a few heads of q, of k or of v of a few tokens.  It holds whole heads in registers, both halves of their
pairs and the rest, so that the norm of a head, its rotation and its amax need no other program.  Every element of q, k
and v is read once and written once; separate launches would read and write q and k twice more.

Traffic at bf16: 4*T*(H + 2*H_kv)*D bytes and the tables: T=8192, H=32, H_kv=8, D=128 cannot beat 48 us at 4.2 TB/s.
A single token is bound by the chain length, row of the table (or page), store: three trips to memory.
The rounding points are those of the references of `rms_norm` and `apply_rope`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.kvcache.kernels.triton import slots
from tilewright.ops.kvcache.kernels.triton.kv_append import Config, tile
from tilewright.ops.kvcache.kernels.triton.slots import (
    as_e4m3,
    head_scale,
    store_heads,
    token_position,
    token_slot,
)
from tilewright.ops.kvcache.rope_kv_append_ import FORWARD, RopeKvAppendArgs, RopeKvAppendBucket
from tilewright.ops.norm.kernels.triton.column_sums import mean_of
from tilewright.ops.quant.kernels.triton.numbers import as_stored, magnitude
from tilewright.ops.rope.kernels.triton.head_tiles import product
from tilewright.ops.rows import no_float64


def configure(bucket: RopeKvAppendBucket, dtype: torch.dtype) -> Config:
    row_bytes = min(max(32, triton.next_power_of_2(bucket.D) * dtype.itemsize), 512)
    return tile(bucket.T * (bucket.H + 2 * bucket.H_kv), bucket.H, row_bytes)


def candidates(bucket: RopeKvAppendBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Configurations with 16 to 128 bytes a thread."""
    row_bytes = triton.next_power_of_2(bucket.D) * dtype.itemsize
    return tuple(
        Config(tokens, heads, warps)
        for warps in (1, 2, 4, 8)
        for heads in (1, 2, 4, 8)
        for tokens in (1, 2, 4, 8, 16, 32)
        if tokens <= bucket.T and heads <= triton.next_power_of_2(bucket.H)
        if 16 <= tokens * heads * row_bytes // (32 * warps) <= 128
    )


CONFIGS = tuple(
    dict.fromkeys(
        configure(RopeKvAppendBucket(t, h, 2, d, 0, 0), torch.bfloat16)
        for h, d in ((32, 128), (4, 16), (1, 64), (8, 256))
        for t in (1, 64, 256, 1024, 8192)
    )
)


@triton.jit
def _rope_kv_append_kernel(
    out, q, k, v, cos, sin, positions, q_weight, k_weight,  # out, q: (T, H, D)   k: (T, H_KV, D)   cos: (P, W)
    k_cache, v_cache, k_scale, v_scale,  # caches: (pages, page_size, H_KV, D)
    lengths, cu_seqlens, block_table, B, new, table_b, table_p, max_pages, pages, page_size,
    T, H, H_KV, P, groups_q, groups_k, eps, q_t, q_h, q_d, cos_p, cos_d, sin_p, sin_d, positions_t,
    k_cache_p, k_cache_s, k_cache_h, k_cache_d, k_t, k_h, k_d, k_scale_p, k_scale_s, k_scale_h,
    v_cache_p, v_cache_s, v_cache_h, v_cache_d, v_t, v_h, v_d, v_scale_p, v_scale_s, v_scale_h,
    D: tl.constexpr, D_V: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, KIND: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    # Find the slots of a tile of tokens, and their rows of the tables
    groups = groups_q + 2 * groups_k
    group = tl.program_id(0) % groups
    token = tl.program_id(0) // groups * TOKENS + tl.arange(0, TOKENS)
    sequence, position, live = token_position(token, T, lengths, cu_seqlens, B, new, BLOCK_B)
    row = position
    if positions is not None:
        row = tl.load(positions + token * positions_t, mask=live, other=0)
    inside = live & (row >= 0) & (row < P)
    cos += row.to(tl.int64)[:, None, None] * cos_p
    sin += row.to(tl.int64)[:, None, None] * sin_p
    offs = tl.arange(0, BLOCK_HALF).to(tl.int64)[None, None, :]
    rest = R + tl.arange(0, BLOCK_REST).to(tl.int64)[None, None, :]
    heads = tl.arange(0, HEADS).to(tl.int64)
    t = token.to(tl.int64)[:, None]
    if group < groups_q:
        # Heads of q, to `out`; 0 for padding
        h = group * HEADS + heads[None, :]
        mask = (t < T) & (h < H)
        x = q + (t * q_t + h * q_h)[:, :, None]
        y1, y2, y3 = _normed_and_rotated(
            x, q_d, q_weight, cos, sin, cos_d, sin_d, offs, rest, mask & live[:, None], inside, eps, D, R, NORM
        )  # fmt: skip
        pointers = out + ((t * H + h) * D)[:, :, None]
        pair_mask = mask[:, :, None] & (offs < R // 2)
        live_heads = live[:, None, None]
        tl.store(pointers + offs, tl.where(live_heads, y1, 0.0).to(y1.dtype), mask=pair_mask)
        tl.store(pointers + R // 2 + offs, tl.where(live_heads, y2, 0.0).to(y2.dtype), mask=pair_mask)
        if R < D:
            tl.store(pointers + rest, tl.where(live_heads, y3, 0.0).to(y3.dtype), mask=mask[:, :, None] & (rest < D))
    else:
        page, place, stored = token_slot(
            sequence, position, live, block_table, table_b, table_p, max_pages, pages, page_size
        )  # fmt: skip
        if group < groups_q + groups_k:
            # Heads of k, to their slots
            h = (group - groups_q) * HEADS + heads[None, :]
            mask = stored[:, None] & (h < H_KV)
            x = k + (t * k_t + h * k_h)[:, :, None]
            y1, y2, y3 = _normed_and_rotated(
                x, k_d, k_weight, cos, sin, cos_d, sin_d, offs, rest, mask, inside, eps, D, R, NORM
            )  # fmt: skip
            slot = page[:, None] * k_cache_p + place[:, None] * k_cache_s + h * k_cache_h
            pointers = k_cache + slot[:, :, None]
            pair_mask = mask[:, :, None] & (offs < R // 2)
            rest_mask = mask[:, :, None] & (rest < D)
            if KIND > 0:
                size = tl.max(tl.where(offs < R // 2, tl.maximum(magnitude(y1), magnitude(y2)), 0), 2)
                if R < D:
                    size = tl.maximum(size, tl.max(magnitude(y3), 2))
                scale_pointers = k_scale + page[:, None] * k_scale_p + place[:, None] * k_scale_s + h * k_scale_h
                factor = head_scale(size, k_scale + h + 0 * t, scale_pointers, mask, KIND)[:, :, None]
                y1, y2 = y1.to(tl.float32), y2.to(tl.float32)
                tl.store(pointers + offs * k_cache_d, as_e4m3(y1, factor, k_cache, KIND), mask=pair_mask)
                tl.store(pointers + (R // 2 + offs) * k_cache_d, as_e4m3(y2, factor, k_cache, KIND), mask=pair_mask)
                if R < D:
                    y3 = as_e4m3(y3.to(tl.float32), factor, k_cache, KIND)
                    tl.store(pointers + rest * k_cache_d, y3, mask=rest_mask)
            else:
                tl.store(pointers + offs * k_cache_d, y1, mask=pair_mask)
                tl.store(pointers + (R // 2 + offs) * k_cache_d, y2, mask=pair_mask)
                if R < D:
                    tl.store(pointers + rest * k_cache_d, y3, mask=rest_mask)
        else:
            store_heads(
                v_cache, v, v_scale, token, page, place, stored, group - groups_q - groups_k, H_KV,
                v_cache_p, v_cache_s, v_cache_h, v_cache_d, v_t, v_h, v_d, v_scale_p, v_scale_s, v_scale_h,
                D_V, KIND, HEADS, BLOCK_DV,
            )  # fmt: skip


@triton.jit
def _normed_and_rotated(
    x, x_d, weight, cos, sin, cos_d, sin_d, offs, rest, mask, inside, eps,  # x: (TOKENS, HEADS, 1)
    D: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """First halves, second halves and the rest of heads, in x's dtype; without a rest the last result is the first.

    offs, rest: elements of a half, and of the rest; mask: (TOKENS, HEADS); inside: has a token a row of the tables?
    """
    pair_mask = mask[:, :, None] & (offs < R // 2)
    x1 = tl.load(x + offs * x_d, mask=pair_mask, other=0.0)
    x2 = tl.load(x + (R // 2 + offs) * x_d, mask=pair_mask, other=0.0)
    x3 = x1
    if R < D:
        x3 = tl.load(x + rest * x_d, mask=mask[:, :, None] & (rest < D), other=0.0)
    if NORM:
        x1_fp32, x2_fp32 = x1.to(tl.float32), x2.to(tl.float32)
        squares = tl.sum(x1_fp32 * x1_fp32 + x2_fp32 * x2_fp32, 2)
        if R < D:
            squares += tl.sum(x3.to(tl.float32) * x3.to(tl.float32), 2)
        rstd = tl.rsqrt(mean_of(squares, D) + eps)[:, :, None]
        rstd = tl.where(mask[:, :, None], rstd, 0.0)  # a masked head is 0: its rstd is infinite if eps is 0
        x1 = _scaled(x1, rstd, tl.load(weight + offs, mask=offs < R // 2, other=0.0))
        x2 = _scaled(x2, rstd, tl.load(weight + R // 2 + offs, mask=offs < R // 2, other=0.0))
        if R < D:
            x3 = _scaled(x3, rstd, tl.load(weight + rest, mask=rest < D, other=0.0))
    # A position outside of the table gives NaN
    angle_mask = inside[:, None, None] & pair_mask
    zeros = tl.zeros_like(pair_mask.to(tl.int64))
    c = tl.load(cos + offs * cos_d + zeros, mask=angle_mask, other=float("nan"))
    s = tl.load(sin + offs * sin_d + zeros, mask=angle_mask, other=float("nan"))
    y1 = product(x1, c) - product(x2, s)
    y2 = product(x2, c) + product(x1, s)
    return y1.to(x1.dtype), y2.to(x1.dtype), x3


@triton.jit
def _scaled(x, rstd, weight):
    """x * rstd, rounded, times weight, rounded: the two roundings of the models' norm."""
    x_hat = (x.to(tl.float32) * rstd).to(x.dtype)
    return (x_hat.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


# A fused multiply-add would skip the rounding of one of the two products.
_kernel = TritonKernel(_rope_kv_append_kernel, enable_fp_fusion=False)


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=lambda args: no_float64(*args),
)
def launch(outs: tuple[Tensor], args: RopeKvAppendArgs, config: Config) -> None:
    (out,) = outs
    q, k, v, cos, sin, k_scale, v_scale = args.q, args.k, args.v, args.cos, args.sin, args.k_scale, args.v_scale
    k_cache, v_cache = as_stored(args.k_cache), as_stored(args.v_cache)
    kind, norm = slots.scale_kind(k_scale), args.q_weight is not None
    if kind == 1:
        k_scale, v_scale = k_scale.contiguous(), v_scale.contiguous()
    weights = (args.q_weight.contiguous(), args.k_weight.contiguous()) if norm else (None, None)
    (tokens, h, d), (_, h_kv, d_v) = q.shape, v.shape
    r = args.rotary_dim or cos.shape[1]
    table, block_b = slots.table(k_cache, tokens, args.lengths, args.block_table, args.cu_seqlens)
    groups_q, groups_k = triton.cdiv(h, config.heads), triton.cdiv(h_kv, config.heads)
    tensors = (out, q, k, v, cos, sin, args.positions, *weights, k_cache, v_cache, k_scale, v_scale)
    sizes = (tokens, h, h_kv, cos.shape[0], groups_q, groups_k, args.eps)
    positions_t = 0 if args.positions is None else args.positions.stride(0)
    strides = (*q.stride(), *cos.stride(), *sin.stride(), positions_t)
    caches = (*slots.strides(k_cache, k, k_scale), *slots.strides(v_cache, v, v_scale))
    blocks = (r // 2, d - r or 1, d_v)
    constants = (
        d, d_v, r, norm, kind, config.tokens, config.heads, *(triton.next_power_of_2(n) for n in blocks), block_b,
    )  # fmt: skip
    grid = (triton.cdiv(tokens, config.tokens) * (groups_q + 2 * groups_k),)
    _kernel(grid, (*tensors, *table, *sizes, *strides, *caches), constants, num_warps=config.num_warps)
