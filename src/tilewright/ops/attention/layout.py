"""Orders of (B, H, S, D) in memory: by head (B, H, S, D), or by token (B, S, H, D) as projections leave it."""

import torch
from torch import Tensor

LAYOUTS = ("BHSD", "BSHD")
"""What a caller may call the order of dimensions; inside it is always BHSD, with strides."""


def by_token(x: Tensor) -> bool:
    """Does (B, H, S, D) lie in memory as (B, S, H, D)?"""
    return bool(x.stride(1) < x.stride(2))


def spec_like(x: Tensor, width: int) -> tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]:
    """An output (B, H, S, width), dense, in x's dtype and order."""
    b, h, s, _ = x.shape
    if by_token(x):
        return (b, h, s, width), x.dtype, (s * h * width, width, h * width, 1)
    return (b, h, s, width), x.dtype, (h * s * width, s * width, width, 1)


def laid_like(made: Tensor, x: Tensor) -> Tensor:
    """`made` (B, H, S, anything), dense in x's order; itself where it lies so."""
    if by_token(x):
        return made.transpose(1, 2).contiguous().transpose(1, 2)
    return made.contiguous()


def readable(x: Tensor) -> Tensor:
    """`x` with a unit last stride, which kernels ask for; a copy where it has another."""
    # not x.contiguous(), which gives back a tensor of one element whatever its strides
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def dense(x: Tensor) -> Tensor:
    """`x` readable and without repeated elements (stride 0), as the gradient of a sum has them."""
    repeats = any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.clone(memory_format=torch.contiguous_format) if repeats else readable(x)
