"""Raw arguments of `apply_rope`, forward and backward, and how q and k lie in memory."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.dispatch.raw import OutputSpec


class ApplyRopeArgs(NamedTuple):
    q: Tensor  # (B, H, S, D), or packed (T, H, D)
    k: Tensor  # (B, H_kv, S, D), or packed (T, H_kv, D)
    cos: Tensor  # (B or 1, S, W), or packed (T, W); with positions a table (P, W)
    sin: Tensor  # as cos
    positions: Tensor | None  # (B or 1, S), or packed (T,)
    interleaved: bool
    rotary_dim: int  # R; 0: W


class ApplyRopeBackwardArgs(NamedTuple):
    dq: Tensor  # as q
    dk: Tensor  # as k
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    interleaved: bool
    rotary_dim: int

    def as_rotation(self) -> ApplyRopeArgs:
        """The same call as a rotation of dq and dk, which the backward turns by the opposite angle."""
        return ApplyRopeArgs(*self)


class RopeBucket(NamedTuple):
    """The tuning key: tokens rounded up to a power of two, heads, head dimension, rotary dimension."""

    T: int
    H: int
    H_kv: int
    D: int
    R: int


def rope_bucket(args: ApplyRopeArgs) -> RopeBucket:
    """The bucket of a rotation."""
    q, k = args.q, args.k
    tokens = q.shape[0] * q.shape[2] if q.dim() == 4 else q.shape[0]
    r = args.rotary_dim or hint(args.cos.shape[-1])
    return RopeBucket(row_bucket(tokens), hint(q.shape[1]), hint(k.shape[1]), hint(q.shape[-1]), r)


def by_token(*tensors: Tensor) -> bool:
    """True if these (B, H, S, D) tensors are (B, S, H, D) in memory, as a projection writes them.

    The stride of a single head says nothing: the first tensor with several heads decides.
    """
    return next((bool(x.stride(1) < x.stride(2)) for x in tensors if x.dim() == 4 and x.shape[1] > 1), False)


def by_token_spec(x: Tensor, dtype: torch.dtype) -> OutputSpec:
    """An output of the shape of `x`, laid out by token; packed tensors already are."""
    if x.dim() == 3:
        return x.shape, dtype
    b, h, s, d = x.shape
    return (b, h, s, d), dtype, (s * h * d, d, h * d, 1)


def rotated_specs(q: Tensor, k: Tensor, dtype: torch.dtype) -> tuple[OutputSpec, OutputSpec]:
    """q' and k', laid out by token if q is (k, if q has one head).

    The projection after attention then needs no copy.
    """
    if by_token(q, k):
        return by_token_spec(q, dtype), by_token_spec(k, dtype)
    return (q.shape, dtype), (k.shape, dtype)
