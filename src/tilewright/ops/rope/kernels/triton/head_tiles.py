"""What kernels over heads of tokens share: strides, rows of the tables, pairs of elements and their angles.

A tile is (TOKENS, HEADS, elements), with both halves of each head's pairs, and the rest behind them, in registers.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.rope.apply_rope.args import ApplyRopeArgs


class Tables(NamedTuple):
    """cos and sin, of the same strides, each token's row of them, and strides of both."""

    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    strides: tuple[int, int, int, int, int]  # of the table: batch, token or row, column; of positions: batch, token


def tables(args: ApplyRopeArgs, single: bool) -> Tables:
    """The tables of a rotation."""
    cos, sin, positions = args.cos, args.sin, args.positions
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    if positions is None:
        return Tables(cos, sin, None, (*_token_strides(cos, single), cos.stride(-1), 0, 0))
    return Tables(cos, sin, positions, (0, cos.stride(0), cos.stride(-1), *_token_strides(positions, single)))


def _token_strides(rows: Tensor, single: bool) -> tuple[int, int]:
    """Strides of batch and token.   rows: (B or 1, S, ...), or packed (T, ...)."""
    first = rows.stride(0) if rows.shape[0] > 1 else 0
    return (0, first) if single else (first, rows.stride(1))


def is_single(x: Tensor) -> bool:
    """Packed tokens, and sequences of one token each, are one sequence: the stride of the batch does not matter."""
    return x.dim() == 3 or x.shape[2] == 1


def head_strides(x: Tensor, single: bool) -> tuple[int, int, int]:
    """Strides of batch, head and token."""
    return (0, x.stride(1), x.stride(0)) if single else (x.stride(0), x.stride(1), x.stride(2))


def unit_stride(x: Tensor) -> Tensor:
    """`x` itself where the elements of a head are adjacent."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def table_rows(positions, b, token, S, P, table_b, table_s, positions_b, positions_s):
    """(TOKENS,) each: where a token's row of the tables begins, and whether the token has one."""
    inside = token < S
    if positions is not None:
        row = tl.load(positions + b * positions_b + token * positions_s, mask=inside, other=0).to(tl.int64)
        inside = inside & (row >= 0) & (row < P)
        begin = row * table_s
    else:
        begin = b * table_b + token * table_s
    return begin, inside


@triton.jit
def load_angles(cos, sin, begin, inside, table_d, mask, R: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """cos and sin of the pairs; NaN for a token without a row.   mask: (TOKENS, HEADS, 1)."""
    offs = tl.arange(0, BLOCK_HALF)[None, None, :]
    pair_mask = mask & (offs < R // 2)
    # Each head reloads its token's angles, from L1 after the first head, so threads exchange none
    angle = tl.broadcast_to(begin[:, None, None] + offs * table_d, pair_mask.shape)
    present = pair_mask & inside[:, None, None]
    other = tl.where(pair_mask, float("nan"), 0.0).to(cos.dtype.element_ty)
    return tl.load(cos + angle, mask=present, other=other), tl.load(sin + angle, mask=present, other=other)


@triton.jit
def load_heads(
    x, mask, D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """First and second elements of the pairs, and the rest of heads, 0 where masked; without a rest the first again.

    x, mask: (TOKENS, HEADS, 1), pointers to heads, and which of them exist.
    """
    offs = tl.arange(0, BLOCK_HALF)[None, None, :]
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_HALF)[None, None, :]
        pairs = tl.load(x + both, mask=mask & (both < R), other=0.0)
        first, second = tl.split(tl.reshape(pairs, (pairs.shape[0], pairs.shape[1], BLOCK_HALF, 2)))
    else:
        first = tl.load(x + offs, mask=mask & (offs < R // 2), other=0.0)
        second = tl.load(x + R // 2 + offs, mask=mask & (offs < R // 2), other=0.0)
    rest = first
    if R < D:
        offs_rest = R + tl.arange(0, BLOCK_REST)[None, None, :]
        rest = tl.load(x + offs_rest, mask=mask & (offs_rest < D), other=0.0)
    return first, second, rest


@triton.jit
def store_heads(
    y, first, second, rest, mask, D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Store what `load_heads` returns, rounded to y's dtype.   y, mask: as x and mask there."""
    first, second = first.to(y.dtype.element_ty), second.to(y.dtype.element_ty)
    offs = tl.arange(0, BLOCK_HALF)[None, None, :]
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_HALF)[None, None, :]
        pairs = tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1], 2 * BLOCK_HALF))
        tl.store(y + both, pairs, mask=mask & (both < R))
    else:
        tl.store(y + offs, first, mask=mask & (offs < R // 2))
        tl.store(y + R // 2 + offs, second, mask=mask & (offs < R // 2))
    if R < D:
        offs_rest = R + tl.arange(0, BLOCK_REST)[None, None, :]
        tl.store(y + offs_rest, rest.to(y.dtype.element_ty), mask=mask & (offs_rest < D))


@triton.jit
def product(x, angle):
    """x * angle in float32; rounded to their dtype if both have one, as the model does."""
    product = x.to(tl.float32) * angle.to(tl.float32)
    if x.dtype == angle.dtype:
        product = product.to(x.dtype).to(tl.float32)
    return product
