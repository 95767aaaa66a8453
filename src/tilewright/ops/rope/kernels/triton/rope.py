"""Rotary embedding in Triton, for apply_rope.

A program rotates a few heads of a few adjacent tokens.  Both halves of a row are in registers, so every element of q
and k is read once and written once.  One launch serves q and k.

Traffic: 4*T*(H+H_kv)*D bytes at bf16 and the tables, so T=8192, H=32, H_kv=8, D=128 cannot beat 40 us at 4.2 TB/s.
Programs that share tokens are adjacent in the grid and find the tables in L2.  Every access is a 16-byte vector
where R/2 and the strides allow it.  The backward rotates by the opposite angle, with the
same kernel: (da, db) = (da' cos + db' sin, db' cos - da' sin).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.ops.dependent import DependentKernel, wait_and_launch_dependents
from tilewright.ops.rope.apply_rope import BACKWARD, FORWARD
from tilewright.ops.rope.apply_rope.args import ApplyRopeArgs, ApplyRopeBackwardArgs, RopeBucket, by_token
from tilewright.ops.rope.kernels.triton.head_tiles import head_strides, is_single, product, tables, unit_stride
from tilewright.ops.rows import no_float64

FILL = 512  # minimum programs before tiles grow: about four for each SM of an H200


class Config(NamedTuple):
    tokens: int
    heads: int
    num_warps: int


HEADS = 4  # the heads that one warp holds at D = 128 in bf16: they share a token, and so a row of the tables

# (warps, 16-byte vectors of each half of a row a thread), largest tile first
_TILES = ((4, 2), (2, 1), (1, 1))


def configure(bucket: RopeBucket, dtype: torch.dtype) -> Config:
    """The largest tile that still gives every SM work; one vector of each half a thread is 1 KB of rows a warp."""
    row_bytes = _clamp(128, triton.next_power_of_2(bucket.D) * dtype.itemsize, 512)
    rotary_bytes = _clamp(64, triton.next_power_of_2(bucket.R) * dtype.itemsize, 512)
    tiles = []
    for warps, vectors in _TILES:
        rows = warps * max(vectors * 1024 // row_bytes, 1024 // rotary_bytes)
        heads = min(rows, HEADS)
        tiles.append(Config(rows // heads, heads, warps))
    head_rows = bucket.T * (bucket.H + bucket.H_kv)
    return next((c for c in tiles if head_rows >= FILL * c.tokens * c.heads), tiles[-1])


def _clamp(low: int, n: int, high: int) -> int:
    return min(max(n, low), high)


def candidates(bucket: RopeBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Configurations with one to four vectors of each half of a row a thread, and few or many heads a tile."""
    row_bytes = triton.next_power_of_2(bucket.D) * dtype.itemsize
    head_rows = bucket.T * (bucket.H + bucket.H_kv)
    max_warps = 8 if head_rows >= 8 * FILL * HEADS else 4  # small problems need small programs
    return tuple(
        Config(tokens, heads, warps)
        for warps in (1, 2, 4, 8)
        for heads in (1, 2, 4, 8)
        for tokens in (1, 2, 4, 8, 16, 32)
        if warps <= max_warps and tokens <= bucket.T and heads <= bucket.H
        if 32 <= tokens * heads * row_bytes // (32 * warps) <= 128
    )


CONFIGS = tuple(
    dict.fromkeys(
        configure(RopeBucket(t, 32, 8, d, r), torch.bfloat16)
        for d, r in ((64, 32), (64, 64), (128, 128), (256, 256))
        for t in (1, 128, 512, 8192)
    )
)


@triton.jit
def _rope_kernel(
    yq, yk, q, k, cos, sin, positions,  # yq, q: (B, H, S, D)   yk, k: (B, H_KV, S, D)   positions: (B, S) or None
    S, H, H_KV, P, blocks, groups_q, groups,  # blocks of tokens in a sequence; groups of heads in q, in q and k
    q_b, q_h, q_s, k_b, k_h, k_s, table_b, table_s, table_d, positions_b, positions_s,  # strides
    D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, BY_TOKEN: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_and_launch_dependents(DEPENDENT)
    # Find the tile of tokens and heads
    group = tl.program_id(0) % groups
    block = tl.program_id(0) // groups
    b = (block // blocks).to(tl.int64)
    token = ((block % blocks) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    # Find the tokens' rows of the tables
    valid = token < S
    if positions is not None:
        table_row = tl.load(positions + b * positions_b + token * positions_s, mask=valid, other=0).to(tl.int64)
        valid = valid & (table_row >= 0) & (table_row < P)
        table_offset = table_row * table_s
    else:
        table_offset = b * table_b + token * table_s
    # Rotate
    if group < groups_q:
        _rotate_heads(
            yq + b * H * S * D, q + b * q_b, cos, sin, token, table_offset, valid, group, S, H, q_h, q_s,
            table_d, D, R, INTERLEAVED, INVERSE, BY_TOKEN, TOKENS, HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        _rotate_heads(
            yk + b * H_KV * S * D, k + b * k_b, cos, sin, token, table_offset, valid, group - groups_q, S, H_KV, k_h,
            k_s, table_d, D, R, INTERLEAVED, INVERSE, BY_TOKEN, TOKENS, HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip


@triton.jit
def _rotate_heads(
    y, x, cos, sin, token, table_offset, valid, group, S, H, x_h, x_s, table_d,  # token, table_offset, valid: (TOKENS,)
    D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, BY_TOKEN: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of TOKENS tokens.   table_offset: start of each token's table row; valid: the row exists."""
    t = token[:, None, None]  # every tile is (TOKENS, HEADS, elements)
    h = (group * HEADS + tl.arange(0, HEADS)).to(tl.int64)[None, :, None]
    head_mask = (t < S) & (h < H)
    x += t * x_s + h * x_h
    y += (t * H + h) * D if BY_TOKEN else (h * S + t) * D
    offs = tl.arange(0, BLOCK_HALF)[None, None, :]
    pair_mask = head_mask & (offs < R // 2)
    offs_both = tl.arange(0, 2 * BLOCK_HALF)[None, None, :]

    # Load the pairs
    offs_angle = offs
    if INTERLEAVED:
        # a thread holds as many angles as pairs, so threads exchange none
        offs_angle = tl.max_contiguous(offs, [1, 1, 64 // x.dtype.element_ty.primitive_bitwidth])
        x_pairs = tl.load(x + offs_both, mask=head_mask & (offs_both < R), other=0.0)
        x1, x2 = tl.split(tl.reshape(x_pairs, (TOKENS, HEADS, BLOCK_HALF, 2)))
    else:
        x1 = tl.load(x + offs, mask=pair_mask, other=0.0)
        x2 = tl.load(x + R // 2 + offs, mask=pair_mask, other=0.0)

    # Load the angles: each head reloads its token's angles, from L1 after the first head, so threads exchange none.
    # A position outside the table gives NaN.
    angle = tl.broadcast_to(table_offset[:, None, None] + offs_angle * table_d, (TOKENS, HEADS, BLOCK_HALF))
    c = tl.load(cos + angle, mask=pair_mask & valid[:, None, None], other=float("nan"))
    s = tl.load(sin + angle, mask=pair_mask & valid[:, None, None], other=float("nan"))
    # Rotate
    if INVERSE:
        y1 = product(x1, c) + product(x2, s)
        y2 = product(x2, c) - product(x1, s)
    else:
        y1 = product(x1, c) - product(x2, s)
        y2 = product(x2, c) + product(x1, s)
    y1, y2 = y1.to(y.dtype.element_ty), y2.to(y.dtype.element_ty)

    # Store the pairs, and copy the rest of each head
    if INTERLEAVED:
        interleaved = tl.reshape(tl.join(y1, y2), (TOKENS, HEADS, 2 * BLOCK_HALF))
        tl.store(y + offs_both, interleaved, mask=head_mask & (offs_both < R))
    else:
        tl.store(y + offs, y1, mask=pair_mask)
        tl.store(y + R // 2 + offs, y2, mask=pair_mask)
    if R < D:
        offs_rest = tl.arange(0, BLOCK_REST)[None, None, :]
        rest_mask = head_mask & (offs_rest < D - R)
        tl.store(y + R + offs_rest, tl.load(x + R + offs_rest, mask=rest_mask), mask=rest_mask)


# A fused multiply-add would skip the rounding of one of the two products.
_kernel = DependentKernel(_rope_kernel, enable_fp_fusion=False)


def rotate(outs: tuple[Tensor, Tensor], args: ApplyRopeArgs, inverse: bool, config: Config) -> None:
    """Rotate q and k into `outs`; with `inverse` by the opposite angle."""
    q, k = unit_stride(args.q), unit_stride(args.k)
    single = is_single(q)
    cos, sin, positions, table_strides = tables(args, single)
    batch, s = (1, q.shape[0]) if single else (q.shape[0], q.shape[2])
    h, h_kv, d = q.shape[1], k.shape[1], q.shape[-1]
    r = args.rotary_dim or cos.shape[-1]
    tokens = min(config.tokens, triton.next_power_of_2(s))
    blocks, groups_q = triton.cdiv(s, tokens), triton.cdiv(h, config.heads)
    groups = groups_q + triton.cdiv(h_kv, config.heads)
    sizes = (s, h, h_kv, cos.shape[0], blocks, groups_q, groups)
    strides = (*head_strides(q, single), *head_strides(k, single), *table_strides)
    block_half, block_rest = triton.next_power_of_2(r // 2), triton.next_power_of_2(d - r) if r < d else 0
    layout = (args.interleaved, inverse, single or by_token(*outs))
    constants = (d, r, *layout, tokens, config.heads, block_half, block_rest)
    tensors = (*outs, q, k, cos, sin, positions)
    _kernel((batch * blocks * groups,), (*tensors, *sizes, *strides), constants, num_warps=config.num_warps)


_TUNING = {
    "configure": configure,
    "config_type": Config,
    "configs": CONFIGS,
    "candidates": candidates,
    "why_not": lambda args: no_float64(*args),
}


@register_kernel(FORWARD, **_TUNING)
def launch(outs: tuple[Tensor, Tensor], args: ApplyRopeArgs, config: Config) -> None:
    rotate(outs, args, False, config)


@register_kernel(BACKWARD, **_TUNING)
def launch_backward(outs: tuple[Tensor, Tensor], args: ApplyRopeBackwardArgs, config: Config) -> None:
    rotate(outs, args.as_rotation(), True, config)
