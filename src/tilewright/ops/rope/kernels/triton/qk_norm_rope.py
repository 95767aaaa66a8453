"""QK-norm and rotary embedding in Triton: q and k are read once and written once, in one launch.

Forward:   rstd = 1 / sqrt(mean(x^2) + eps) of each head, x_hat = x * rstd, n = x_hat * w, with w = offset + weight;
           then each pair (a, b) of the first R elements of n becomes (a cos - b sin, b cos + a sin).
Backward:  dn is dy turned by the opposite angle, (da cos + db sin, db cos - da sin); with wdn = w * dn, for each head,
               dx = rstd * (wdn - x_hat * (1 / D) * dot(wdn, x_hat))
           and, summed over tokens and heads, dweight = sum(dn * x_hat).
Without fp32_weight x_hat is rounded to x's dtype before it is multiplied by the weight, and so in dweight.

A program holds whole heads in registers: a few heads of a few adjacent tokens, which share rows of the tables.  The
backward reads x in any case and computes rstd and x_hat again, so the forward saves nothing.  A fixed number of
programs takes tiles of q, then of k, and accumulates both weight gradients; `column_sums` adds their results in a fixed
order.

Traffic: forward 4*T*(H + H_kv)*D bytes at bf16 and the tables, so T=4096, H=32, H_kv=8, D=128 cannot beat 20 us at
4.2 TB/s; the backward reads dy and x and writes dx, 6*T*(H + H_kv)*D, 30 us.  Norms and rotation in launches of their
own read and write q and k twice as often.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.hardware import device_info
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.norm.kernels.triton.column_sums import column_sums, mean_of
from tilewright.ops.rope.apply_rope.args import RopeBucket
from tilewright.ops.rope.kernels.triton.head_tiles import (
    head_strides,
    is_single,
    load_angles,
    load_heads,
    product,
    store_heads,
    table_rows,
    tables,
    unit_stride,
)
from tilewright.ops.rope.kernels.triton.rope import FILL, HEADS, Config
from tilewright.ops.rope.qk_norm_rope import BACKWARD, FORWARD
from tilewright.ops.rope.qk_norm_rope.args import QkNormRopeArgs, QkNormRopeBackwardArgs
from tilewright.ops.rows import no_float64

MAX_D = 512  # 32 elements a thread in the forward


class PersistentConfig(NamedTuple):
    """Persistent programs: each loops over tiles and leaves one partial gradient of both weights."""

    tokens: int
    heads: int
    num_warps: int
    ctas_per_sm: int  # programs per SM


def _tile(elements: int, block: int) -> tuple[int, int]:
    """(tokens, heads) of a tile of so many elements."""
    rows = elements // block
    heads = min(rows, HEADS)
    return rows // heads, heads


def configure(bucket: RopeBucket, dtype: torch.dtype) -> Config | None:
    """16 elements a thread of what is rotated, 8 of each half, which are 16 bytes at bf16; 32 of longer heads.

    4 warps where that still gives every SM work.
    """
    width = triton.next_power_of_2(bucket.D)
    if width > MAX_D:
        return None
    block = min(max(64, triton.next_power_of_2(bucket.R), width // 2), 256)
    large = bucket.T * (bucket.H + bucket.H_kv) * block >= FILL * 2048
    return Config(*_tile(2048, block), num_warps=4) if large else Config(*_tile(512, block), num_warps=1)


def configure_backward(bucket: RopeBucket, dtype: torch.dtype) -> PersistentConfig | None:
    """16 bytes of each half of x and of dy a thread, and 16 warps an SM, which at bf16 have 128 registers each."""
    block = max(64, triton.next_power_of_2(bucket.D))
    elements = max(2048 if dtype.itemsize == 2 else 1024, HEADS * block)
    return None if block > MAX_D else PersistentConfig(*_tile(elements, block), num_warps=4, ctas_per_sm=4)


def candidates(bucket: RopeBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Configurations with 4 to 32 elements a thread, and few or many heads a tile."""
    width = triton.next_power_of_2(bucket.D)
    return tuple(
        Config(tokens, heads, warps)
        for warps in (1, 2, 4, 8)
        for heads in (1, 2, 4, 8)
        for tokens in (1, 2, 4, 8)
        if tokens <= bucket.T and heads <= bucket.H and width <= MAX_D
        if 4 <= tokens * heads * width // (32 * warps) <= 32
    )


def candidates_backward(bucket: RopeBucket, dtype: torch.dtype) -> tuple[PersistentConfig, ...]:
    """Configurations with 4 to 16 elements of x and of dy a thread."""
    width = triton.next_power_of_2(bucket.D)
    return tuple(
        PersistentConfig(*tile, ctas_per_sm)
        for tile in candidates(bucket, dtype)
        for ctas_per_sm in (1, 2, 4, 8)
        if tile.tokens * tile.heads * width <= 512 * tile.num_warps and ctas_per_sm * tile.num_warps in (8, 16)
    )


_WIDTHS = (torch.bfloat16, torch.float32)
_SIZES = [RopeBucket(t, 32, 8, 64 << i, 64 << i) for t in (1, 1 << 20) for i in range(4)]


@triton.jit
def _qk_norm_rope_kernel(
    yq, yk, q, k, q_weight, k_weight, cos, sin, positions,  # yq, q: (B, H, S, D)   yk, k: (B, H_KV, S, D)
    S, H, H_KV, P, blocks, groups_q, groups, eps, offset,  # blocks of tokens in a sequence; groups of heads
    yq_b, yq_h, yq_s, yk_b, yk_h, yk_s, q_b, q_h, q_s, k_b, k_h, k_s,
    table_b, table_s, table_d, positions_b, positions_s,
    D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, FP32_WEIGHT: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    # Find the tile of tokens and heads, and its rows of the tables
    group = tl.program_id(0) % groups
    block = tl.program_id(0) // groups
    b = (block // blocks).to(tl.int64)
    token = ((block % blocks) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    begin, inside = table_rows(positions, b, token, S, P, table_b, table_s, positions_b, positions_s)
    heads = tl.arange(0, HEADS)
    if group < groups_q:
        _norm_and_rotate(
            yq + b * yq_b, q + b * q_b, q_weight, cos, sin, token, begin, inside, group * HEADS + heads, S, H,
            yq_h, yq_s, q_h, q_s, table_d, eps, offset, D, R, INTERLEAVED, FP32_WEIGHT, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        _norm_and_rotate(
            yk + b * yk_b, k + b * k_b, k_weight, cos, sin, token, begin, inside, (group - groups_q) * HEADS + heads,
            S, H_KV, yk_h, yk_s, k_h, k_s, table_d, eps, offset, D, R, INTERLEAVED, FP32_WEIGHT, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip


@triton.jit
def _norm_and_rotate(
    y, x, weight, cos, sin, token, begin, inside, head, S, H, y_h, y_s, x_h, x_s, table_d, eps, offset,
    D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, FP32_WEIGHT: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate some heads of some tokens.   token, begin, inside: (TOKENS,)   head: (HEADS,)."""
    # Load the heads and the weight
    t = token[:, None, None]
    h = head.to(tl.int64)[None, :, None]
    mask = (t < S) & (h < H)
    x1, x2, x3 = load_heads(x + t * x_s + h * x_h, mask, D, R, INTERLEAVED, BLOCK_HALF, BLOCK_REST)
    w1, w2, w3 = _load_weight(weight, token.shape[0], head.shape[0], D, R, INTERLEAVED, BLOCK_HALF, BLOCK_REST)
    # Normalise, and round as the models do
    rstd = _rstd(x1, x2, x3, mask, eps, D, R)
    n1 = _weighted(x1, rstd, w1, offset, y, FP32_WEIGHT)
    n2 = _weighted(x2, rstd, w2, offset, y, FP32_WEIGHT)
    n3 = _weighted(x3, rstd, w3, offset, y, FP32_WEIGHT)
    # Rotate and store
    c, s = load_angles(cos, sin, begin, inside, table_d, mask, R, BLOCK_HALF)
    y1 = product(n1, c) - product(n2, s)
    y2 = product(n2, c) + product(n1, s)
    store_heads(y + t * y_s + h * y_h, y1, y2, n3, mask, D, R, INTERLEAVED, BLOCK_HALF, BLOCK_REST)


@triton.jit
def _load_weight(
    weight, TOKENS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """The weight in float32, once for each head of a tile: from L1 after the first head, so threads exchange none."""
    each = tl.zeros((TOKENS, HEADS, 1), tl.int32)
    w1, w2, w3 = load_heads(weight + each, each == 0, D, R, INTERLEAVED, BLOCK_HALF, BLOCK_REST)
    return w1.to(tl.float32), w2.to(tl.float32), w3.to(tl.float32)


@triton.jit
def _rstd(x1, x2, x3, mask, eps, D: tl.constexpr, R: tl.constexpr):
    """(TOKENS, HEADS, 1); 0 for a masked head, which is 0: its rstd would be infinite if eps is 0."""
    x1, x2, x3 = x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    squares = tl.sum(x1 * x1 + x2 * x2, 2)
    if R < D:
        squares += tl.sum(x3 * x3, 2)
    return tl.where(mask, tl.rsqrt(mean_of(squares, D) + eps)[:, :, None], 0.0)


@triton.jit
def _weighted(x, rstd, w, offset, y, FP32_WEIGHT: tl.constexpr):
    """x * rstd * w in y's dtype, rounded once, or x * rstd to x's dtype before."""
    x_hat = x.to(tl.float32) * rstd
    if FP32_WEIGHT:
        return (x_hat * (offset + w)).to(y.dtype.element_ty)
    return (x_hat.to(x.dtype).to(tl.float32) * w).to(y.dtype.element_ty)


@triton.jit
def _qk_norm_rope_backward_kernel(
    dq, dk, dq_weight, dk_weight, dyq, dyk, q, k, q_weight, k_weight, cos, sin, positions,  # dq_weight: (programs, D)
    S, H, H_KV, P, blocks, tiles_q, tiles_k, groups_q, groups_k, eps, offset,
    dq_b, dq_h, dq_s, dk_b, dk_h, dk_s, dyq_b, dyq_h, dyq_s, dyk_b, dyk_h, dyk_s, q_b, q_h, q_s, k_b, k_h, k_s,
    table_b, table_s, table_d, positions_b, positions_s,
    D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, FP32_WEIGHT: tl.constexpr, NEED_DWEIGHT: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    _backward_tiles(
        dq, dq_weight, dyq, q, q_weight, cos, sin, positions, S, H, P, blocks, tiles_q, groups_q, eps, offset,
        dq_b, dq_h, dq_s, dyq_b, dyq_h, dyq_s, q_b, q_h, q_s, table_b, table_s, table_d, positions_b, positions_s,
        D, R, INTERLEAVED, FP32_WEIGHT, NEED_DWEIGHT, TOKENS, HEADS, BLOCK_HALF, BLOCK_REST,
    )  # fmt: skip
    _backward_tiles(
        dk, dk_weight, dyk, k, k_weight, cos, sin, positions, S, H_KV, P, blocks, tiles_k, groups_k, eps, offset,
        dk_b, dk_h, dk_s, dyk_b, dyk_h, dyk_s, k_b, k_h, k_s, table_b, table_s, table_d, positions_b, positions_s,
        D, R, INTERLEAVED, FP32_WEIGHT, NEED_DWEIGHT, TOKENS, HEADS, BLOCK_HALF, BLOCK_REST,
    )  # fmt: skip


@triton.jit
def _backward_tiles(
    dx, dweight, dy, x, weight, cos, sin, positions, S, H, P, blocks, tiles, groups, eps, offset,
    dx_b, dx_h, dx_s, dy_b, dy_h, dy_s, x_b, x_h, x_s, table_b, table_s, table_d, positions_b, positions_s,
    D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, FP32_WEIGHT: tl.constexpr, NEED_DWEIGHT: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """This program's share of the tiles of q, or of k, and its partial gradient of the weight."""
    w1, w2, w3 = _load_weight(weight, TOKENS, HEADS, D, R, INTERLEAVED, BLOCK_HALF, BLOCK_REST)
    w1, w2, w3 = w1 + offset, w2 + offset, w3 + offset
    dw1 = tl.zeros((TOKENS, HEADS, BLOCK_HALF), tl.float32)
    dw2 = tl.zeros((TOKENS, HEADS, BLOCK_HALF), tl.float32)
    dw3 = dw1
    if R < D:
        dw3 = tl.zeros((TOKENS, HEADS, BLOCK_REST), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        # Load a tile of x and dy
        block = tile // groups
        b = (block // blocks).to(tl.int64)
        token = ((block % blocks) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        t = token[:, None, None]
        h = (tile % groups * HEADS + tl.arange(0, HEADS)).to(tl.int64)[None, :, None]
        mask = (t < S) & (h < H)
        x_heads = x + b * x_b + t * x_s + h * x_h
        x1, x2, x3 = load_heads(x_heads, mask, D, R, INTERLEAVED, BLOCK_HALF, BLOCK_REST)
        dy_heads = dy + b * dy_b + t * dy_s + h * dy_h
        dy1, dy2, dy3 = load_heads(dy_heads, mask, D, R, INTERLEAVED, BLOCK_HALF, BLOCK_REST)
        # Turn dy back
        begin, inside = table_rows(positions, b, token, S, P, table_b, table_s, positions_b, positions_s)
        c, s = load_angles(cos, sin, begin, inside, table_d, mask, R, BLOCK_HALF)
        dy1, dy2, c, s = dy1.to(tl.float32), dy2.to(tl.float32), c.to(tl.float32), s.to(tl.float32)
        dn1 = dy1 * c + dy2 * s
        dn2 = dy2 * c - dy1 * s
        dn3 = dy3.to(tl.float32)
        # Recompute x_hat
        rstd = _rstd(x1, x2, x3, mask, eps, D, R)
        x_hat1, x_hat2, x_hat3 = x1.to(tl.float32) * rstd, x2.to(tl.float32) * rstd, x3.to(tl.float32) * rstd
        # Compute and store dx
        wdn1, wdn2, wdn3 = dn1 * w1, dn2 * w2, dn3 * w3
        dot = tl.sum(wdn1 * x_hat1 + wdn2 * x_hat2, 2)
        if R < D:
            dot += tl.sum(wdn3 * x_hat3, 2)
        mean = mean_of(dot, D)[:, :, None]
        dx1, dx2, dx3 = (
            (wdn1 - x_hat1 * mean) * rstd, (wdn2 - x_hat2 * mean) * rstd, (wdn3 - x_hat3 * mean) * rstd,
        )  # fmt: skip
        dx_heads = dx + b * dx_b + t * dx_s + h * dx_h
        store_heads(dx_heads, dx1, dx2, dx3, mask, D, R, INTERLEAVED, BLOCK_HALF, BLOCK_REST)
        # Accumulate dw
        if NEED_DWEIGHT:
            if not FP32_WEIGHT:
                x_hat1, x_hat2 = x_hat1.to(x1.dtype).to(tl.float32), x_hat2.to(x2.dtype).to(tl.float32)
                x_hat3 = x_hat3.to(x3.dtype).to(tl.float32)
            dw1 += dn1 * x_hat1
            dw2 += dn2 * x_hat2
            if R < D:
                dw3 += dn3 * x_hat3
    # Store this program's partial dw
    if NEED_DWEIGHT:
        one = tl.zeros((1, 1, 1), tl.int32)
        dw_row = dweight + tl.program_id(0).to(tl.int64) * D + one
        store_heads(
            dw_row, _over_heads(dw1), _over_heads(dw2), _over_heads(dw3), one == 0, D, R, INTERLEAVED, BLOCK_HALF,
            BLOCK_REST,
        )  # fmt: skip


@triton.jit
def _over_heads(dw):
    """(TOKENS, HEADS, n) -> (1, 1, n)."""
    return tl.sum(tl.sum(dw, 0), 0)[None, None, :]


# A fused multiply-add would skip the rounding of one of the two products.
_forward = TritonKernel(_qk_norm_rope_kernel, enable_fp_fusion=False)
_backward = TritonKernel(_qk_norm_rope_backward_kernel)


def _blocks(d: int, r: int) -> tuple[int, int]:
    """BLOCK_HALF, BLOCK_REST."""
    return triton.next_power_of_2(r // 2), triton.next_power_of_2(d - r) if r < d else 0


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=tuple(dict.fromkeys(configure(sizes, torch.bfloat16) for sizes in _SIZES)),
    candidates=candidates,
    why_not=lambda args: no_float64(*args),
)
def launch(outs: tuple[Tensor, Tensor], args: QkNormRopeArgs, config: Config) -> None:
    q, k = unit_stride(args.q), unit_stride(args.k)
    single = is_single(q)
    table = tables(args.as_rotation(), single)
    batch, s = (1, q.shape[0]) if single else (q.shape[0], q.shape[2])
    h, h_kv, d = q.shape[1], k.shape[1], q.shape[-1]
    r = args.rotary_dim or args.cos.shape[-1]
    # A tile smaller for few tokens would add up a head in another order
    blocks, groups_q = triton.cdiv(s, config.tokens), triton.cdiv(h, config.heads)
    groups = groups_q + triton.cdiv(h_kv, config.heads)
    weights = args.q_weight.contiguous(), args.k_weight.contiguous()
    tensors = (*outs, q, k, *weights, table.cos, table.sin, table.positions)
    sizes = (s, h, h_kv, table.cos.shape[0], blocks, groups_q, groups, args.eps, args.offset)
    strides = [stride for x in (*outs, q, k) for stride in head_strides(x, single)]
    constants = (d, r, args.interleaved, args.fp32_weight, config.tokens, config.heads, *_blocks(d, r))
    grid = (batch * blocks * groups,)
    _forward(grid, (*tensors, *sizes, *strides, *table.strides), constants, num_warps=config.num_warps)


@register_kernel(
    BACKWARD,
    configure=configure_backward,
    config_type=PersistentConfig,
    configs=tuple(dict.fromkeys(configure_backward(sizes, dtype) for dtype in _WIDTHS for sizes in _SIZES)),
    candidates=candidates_backward,
    why_not=lambda args: no_float64(*args),
)
def launch_backward(outs: tuple[Tensor, ...], args: QkNormRopeBackwardArgs, config: PersistentConfig) -> None:
    dq, dk, dq_weight, dk_weight = outs
    dyq, dyk, q, k = (unit_stride(x) for x in (args.dyq, args.dyk, args.q, args.k))
    single = is_single(q)
    table = tables(args.as_rotation(), single)
    batch, s = (1, q.shape[0]) if single else (q.shape[0], q.shape[2])
    h, h_kv, d = q.shape[1], k.shape[1], q.shape[-1]
    r = args.rotary_dim or args.cos.shape[-1]
    tokens = min(config.tokens, triton.next_power_of_2(s))
    blocks, groups = triton.cdiv(s, tokens), (triton.cdiv(h, config.heads), triton.cdiv(h_kv, config.heads))
    tiles = [batch * blocks * n for n in groups]
    programs = min(max(tiles), config.ctas_per_sm * device_info(q.device).sm_count)
    partial = [scratch((programs if args.need_dweight else 1, d), torch.float32, q.device) for _ in range(2)]
    weights = args.q_weight.contiguous(), args.k_weight.contiguous()
    tensors = (dq, dk, *partial, dyq, dyk, q, k, *weights, table.cos, table.sin, table.positions)
    sizes = (s, h, h_kv, table.cos.shape[0], blocks, *tiles, *groups, args.eps, args.offset)
    strides = [stride for x in (dq, dk, dyq, dyk, q, k) for stride in head_strides(x, single)]
    flags = (args.interleaved, args.fp32_weight, args.need_dweight)
    constants = (d, r, *flags, tokens, config.heads, *_blocks(d, r))
    _backward((programs,), (*tensors, *sizes, *strides, *table.strides), constants, num_warps=config.num_warps)
    if args.need_dweight:
        column_sums(dq_weight, partial[0])
        column_sums(dk_weight, partial[1])
