"""Memory orders of (B, H, S, D): by head (B, H, S, D), or by token (B, S, H, D), as projections write it."""

import torch
from torch import Tensor

from tilewright.dispatch.bucket import hint
from tilewright.ops.gemm.operands import VECTOR, copyable

LAYOUTS = ("BHSD", "BSHD")
"""Orders of dimensions that a caller may pass; inside it is always BHSD, with strides."""


def by_token(x: Tensor) -> bool:
    """True if (B, H, S, D) lies in memory as (B, S, H, D).  With one head or token both hold, so use it only to choose
    the layout of results.
    """
    return bool(x.stride(1) < x.stride(2))


def spec_like(x: Tensor, width: int) -> tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]:
    """An output (B, H, S, width), dense, in x's dtype and order."""
    b, h, s, _ = x.shape
    if by_token(x):
        return (b, h, s, width), x.dtype, (s * h * width, width, h * width, 1)
    return (b, h, s, width), x.dtype, (h * s * width, s * width, width, 1)


def laid_like(t: Tensor, x: Tensor) -> Tensor:
    """`made` (B, H, S, anything), dense in x's memory order; itself if it is."""
    if by_token(x):
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    return t.contiguous()


def readable(x: Tensor) -> Tensor:
    """`x` with a unit last stride, which kernels need; a copy if it has another."""
    # not x.contiguous(), which returns a tensor of one element unchanged, whatever its strides
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def addressable(x: Tensor) -> bool:
    """True if every row of x (B, H, S, D) is contiguous and begins at a multiple of 16 bytes, as TMA and vector loads
    need.  Strides of dimensions of one element do not matter, and none of a tensor without elements.
    """
    if any(hint(n) == 0 for n in x.shape):
        return True
    steps = [hint(step) for n, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if hint(n) > 1]
    return hint(x.stride(-1)) == 1 and 1 not in steps and copyable(x)


def dense(x: Tensor) -> Tensor:
    """`x` readable, without stride 0 (as in the gradient of a sum), and with rows at multiples of 16 bytes if their
    length is one: a copy if it is not.
    """
    if addressable(x):
        return x
    repeats = any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    if repeats or hint(x.shape[-1]) * x.element_size() % VECTOR == 0:
        return x.clone(memory_format=torch.contiguous_format)
    return readable(x)


def loadable(x: Tensor) -> Tensor:
    """`x` for torch's own kernels, which load vectors of 16 bytes without checking addresses: a copy if its rows are
    not aligned, and the strides of a dense tensor for dimensions of one element.
    """
    if not addressable(x):
        x = x.clone(memory_format=torch.contiguous_format)
    for dim in range(x.dim() - 2, -1, -1):
        step = hint(x.stride(dim)) * x.element_size()
        if hint(x.shape[dim]) == 1 and (step % VECTOR or not step):
            x = x.squeeze(dim).unsqueeze(dim)
    return x
