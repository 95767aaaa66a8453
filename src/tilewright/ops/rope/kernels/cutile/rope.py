"""Rotary embedding in cuTile, for apply_rope.

A block rotates a few heads of a few adjacent tokens.  Both halves of a row are in registers, so every element of q
and k is read once and written once.  One launch serves q and k.

Traffic: 4*T*(H+H_kv)*D bytes at bf16 and the tables, so T=8192, H=32, H_kv=8, D=128 cannot beat 40 us at 4.2 TB/s.
Every tensor is a view (batch, head, token, element) or (batch, token, column) with its strides.  Blocks that share
tokens are adjacent in the grid and find the tables in L2.  The backward rotates by the opposite angle.
"""

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.cutile_language import ct
from tilewright.jit.cutile_launch import CutileKernel, Hints
from tilewright.ops.rope.apply_rope import BACKWARD, FORWARD
from tilewright.ops.rope.apply_rope.args import ApplyRopeArgs, ApplyRopeBackwardArgs, RopeBucket
from tilewright.ops.rows import no_float64

FILL = 512  # minimum blocks before tiles grow: about four for each SM of an H200
NAN = float("nan")


class Config(NamedTuple):
    tokens: int
    heads: int
    num_warps: int = 4  # 4 or 8
    occupancy: int = 0  # blocks per SM; 0: tileiras chooses


HEADS = 4  # the heads that one warp holds at D = 128 in bf16: they share a token, and so a row of the tables


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _tile(vectors: int, bucket: RopeBucket, dtype: torch.dtype, heads: int = HEADS) -> Config:
    """A tile for 128 threads: `vectors` 16-byte vectors of each half a thread, and at most 8 of a whole row."""
    half, row = (next_power_of_2(n) * dtype.itemsize for n in (bucket.R // 2, bucket.D))
    rows = max(1, min(vectors * 2048 // max(32, half), 8 * 2048 // row))
    heads = min(heads, rows)
    return Config(rows // heads, heads)


def configure(bucket: RopeBucket, dtype: torch.dtype) -> Config:
    """The largest tile that still gives every SM work."""
    one = _tile(1, bucket, dtype)
    tiles = (_tile(2, bucket, dtype), one, Config(min(2, one.tokens), one.heads), Config(1, one.heads))
    head_rows = bucket.T * (bucket.H + bucket.H_kv)
    return next((c for c in tiles if head_rows >= FILL * c.tokens * c.heads), tiles[-1])


CONFIGS = tuple(
    dict.fromkeys(
        configure(RopeBucket(t, 32, 8, d, r), dtype)
        for d, r in ((64, 32), (64, 64), (128, 128), (256, 256))
        for t in (1, 128, 512, 8192)
        for dtype in (torch.bfloat16, torch.float32)
    )
)


def candidates(bucket: RopeBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Configurations with one, two or four vectors of each half a thread, or the same tile with twice the threads."""
    configs = []
    for vectors, heads in product((1, 2, 4), (1, 4, 8)):
        tile = _tile(vectors, bucket, dtype, heads)
        configs += [tile, tile._replace(num_warps=8), tile._replace(tokens=max(1, tile.tokens // 2))]
        if vectors == 1:
            configs.append(tile._replace(occupancy=8))
    return tuple(dict.fromkeys(configs))


def _rope_kernel(
    yq, yk, q, k, cos, sin, positions,  # q, yq: (B, H, S, D)   k, yk: (B, H_KV, S, D)   positions: (B, S)
    R: ct.Constant[int], POSITIONS: ct.Constant[bool], INTERLEAVED: ct.Constant[bool], INVERSE: ct.Constant[bool],
    TOKENS: ct.Constant[int], HEADS: ct.Constant[int], BLOCK_HALF: ct.Constant[int], BLOCK_REST: ct.Constant[int],
):  # fmt: skip  # cos, sin: (B, S, W), or with POSITIONS (1, P, W)
    # Find the tile of tokens and heads
    groups_q = ct.cdiv(q.shape[1], HEADS)
    groups = groups_q + ct.cdiv(k.shape[1], HEADS)
    blocks = ct.cdiv(q.shape[2], TOKENS)
    group = ct.bid(0) % groups
    block = ct.bid(0) // groups
    b = block // blocks
    token = block % blocks * TOKENS + ct.arange(TOKENS, dtype=ct.int32)
    # Find the tokens' rows of the tables; a position outside the table gives NaN, the padding of its angles
    if POSITIONS:
        table_index = (0, ct.gather(positions, (b, token))[:, None, None])
    else:
        table_index = (b, token[:, None, None])
    # Rotate
    if group < groups_q:
        _rotate_heads(yq, q, cos, sin, b, group, token, table_index,
              R, INTERLEAVED, INVERSE, HEADS, BLOCK_HALF, BLOCK_REST)  # fmt: skip
    else:
        _rotate_heads(yk, k, cos, sin, b, group - groups_q, token, table_index,
              R, INTERLEAVED, INVERSE, HEADS, BLOCK_HALF, BLOCK_REST)  # fmt: skip


def _rotate_heads(y, x, cos, sin, b, group, token, table_index, R, INTERLEAVED, INVERSE, HEADS, BLOCK_HALF, BLOCK_REST):
    """Rotate HEADS heads of each token; every tile is (TOKENS, HEADS, elements)."""
    h = (group * HEADS + ct.arange(HEADS, dtype=ct.int32))[None, :, None]
    t = token[:, None, None]
    tile = (token.shape[0], HEADS, BLOCK_HALF)
    offs = ct.arange(BLOCK_HALF, dtype=ct.int32)[None, None, :]
    pair_mask = None
    if 2 * BLOCK_HALF > R:
        pair_mask = offs < R // 2
    # Load the pairs
    if INTERLEAVED:
        offs_angle = offs
        offs_both = ct.arange(2 * BLOCK_HALF, dtype=ct.int32)[None, None, :]
        x_pairs = ct.gather(x, (b, h, t, offs_both), mask=offs_both < R).reshape((*tile, 2))
        x1 = x_pairs.extract((0, 0, 0, 0), (*tile, 1)).reshape(tile)
        x2 = x_pairs.extract((0, 0, 0, 1), (*tile, 1)).reshape(tile)
    else:
        # Each head reloads its token's angles, from L1 after the first head.  Otherwise a token's angles would reach
        # the threads of its heads through 64 KB of shared memory.
        offs_angle = ct.broadcast_to(offs, tile)
        x1 = ct.gather(x, (b, h, t, offs), mask=pair_mask)
        x2 = ct.gather(x, (b, h, t, offs + R // 2), mask=pair_mask)
    # Load the angles
    c = ct.gather(cos, (*table_index, offs_angle), mask=pair_mask, padding_value=NAN)
    s = ct.gather(sin, (*table_index, offs_angle), mask=pair_mask, padding_value=NAN)
    # Rotate
    if INVERSE:
        y1 = _product(x1, c) + _product(x2, s)
        y2 = _product(x2, c) - _product(x1, s)
    else:
        y1 = _product(x1, c) - _product(x2, s)
        y2 = _product(x2, c) + _product(x1, s)
    y1, y2 = y1.astype(y.dtype), y2.astype(y.dtype)
    # Store the pairs, and copy the rest of each head
    if INTERLEAVED:
        interleaved = ct.cat((y1.reshape((*tile, 1)), y2.reshape((*tile, 1))), 3)
        interleaved = interleaved.reshape((token.shape[0], HEADS, 2 * BLOCK_HALF))
        ct.scatter(y, (b, h, t, offs_both), interleaved, mask=offs_both < R)
    else:
        ct.scatter(y, (b, h, t, offs), y1, mask=pair_mask)
        ct.scatter(y, (b, h, t, offs + R // 2), y2, mask=pair_mask)
    if BLOCK_REST > 0:
        offs_rest = R + ct.arange(BLOCK_REST, dtype=ct.int32)[None, None, :]
        ct.scatter(y, (b, h, t, offs_rest), ct.gather(x, (b, h, t, offs_rest)))


def _product(x, angle):
    """x * angle in float32; rounded to their dtype if both have one, as the model does."""
    product = x.astype(ct.float32) * angle.astype(ct.float32)
    if x.dtype == angle.dtype:
        product = product.astype(x.dtype).astype(ct.float32)
    return product


_kernel = CutileKernel(_rope_kernel)


def rotate(outs: tuple[Tensor, Tensor], args: ApplyRopeArgs, inverse: bool, config: Config) -> None:
    """Rotate q and k into `outs`; with `inverse` by the opposite angle."""
    cos, sin, positions = args.cos, args.sin, args.positions
    packed = args.q.dim() == 3
    r, d = args.rotary_dim or cos.shape[-1], args.q.shape[-1]
    tensors = tuple(_by_head(x) for x in (*outs, args.q, args.k))
    batch, h, s = tensors[2].shape[:3]
    if positions is None:
        cos, sin = (_by_batch(t, packed, batch, s) for t in (cos, sin))
        rows = cos  # not read
    else:
        cos, sin, rows = cos[None], sin[None], _by_batch(positions, packed, batch, s)
    tokens = min(config.tokens, next_power_of_2(s))
    groups = -(-h // config.heads) + -(-tensors[3].shape[1] // config.heads)
    block_rest = next_power_of_2(d - r) if r < d else 0
    constants = (
        r,
        positions is not None,
        args.interleaved,
        inverse,
        tokens,
        config.heads,
        next_power_of_2(r // 2),
        block_rest,
    )
    grid = (batch * -(-s // tokens) * groups,)
    _kernel(grid, (*tensors, cos, sin, rows), constants, Hints(config.num_warps, config.occupancy or None))


def _by_head(x: Tensor) -> Tensor:
    """View as (B, H, S, D); packed tokens, and sequences of one token each, become one sequence."""
    if x.dim() == 3:
        return x.transpose(0, 1)[None]
    return x.transpose(0, 2) if x.shape[2] == 1 else x


def _by_batch(rows: Tensor, packed: bool, batch: int, s: int) -> Tensor:
    """Expand rows (B or 1, S, ...), or packed (T, ...), to (B, S, ...)."""
    if packed:
        return rows[None]
    if rows.shape[1] == 1:
        rows = rows.transpose(0, 1)
    return rows.expand(batch, s, *rows.shape[2:])


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
