"""Orders of (B, H, S, D) in memory: by head (B, H, S, D), or by token (B, S, H, D) as projections leave it."""

import torch
from torch import Tensor

from tilewright.dispatch.bucket import hint
from tilewright.ops.gemm.operands import VECTOR, copyable

LAYOUTS = ("BHSD", "BSHD")
"""What a caller may call the order of dimensions; inside it is always BHSD, with strides."""


def by_token(x: Tensor) -> bool:
    """Does (B, H, S, D) lie in memory as (B, S, H, D)?  With one head or token it lies as either: for results alone,
    whose strides are made of sizes.
    """
    return bool(x.stride(1) < x.stride(2))


def spec_like(x: Tensor, width: int) -> tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]:
    """An output (B, H, S, width), dense, in x's dtype and order."""
    b, h, s, _ = x.shape
    if by_token(x):
        return (b, h, s, width), x.dtype, (s * h * width, width, h * width, 1)
    return (b, h, s, width), x.dtype, (h * s * width, s * width, width, 1)


def laid_like(t: Tensor, x: Tensor) -> Tensor:
    """`made` (B, H, S, anything), dense in x's order; itself where it lies so."""
    if by_token(x):
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    return t.contiguous()


def readable(x: Tensor) -> Tensor:
    """`x` with a unit last stride, which kernels ask for; a copy where it has another."""
    # not x.contiguous(), which gives back a tensor of one element whatever its strides
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def addressable(x: Tensor) -> bool:
    """Does every row of x (B, H, S, D) begin at a multiple of 16 bytes, and lie together?  So the copy engine and loads
    of whole vectors need it.  Dimensions of one element step nowhere, whatever their strides.
    """
    steps = [hint(step) for n, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if hint(n) > 1]
    return hint(x.stride(-1)) == 1 and 1 not in steps and copyable(x)


def dense(x: Tensor) -> Tensor:
    """`x` readable, without repeated elements (stride 0), as the gradient of a sum has them, and with rows at multiples
    of 16 bytes where they are as long: a copy where it is not.
    """
    if addressable(x):
        return x
    repeats = any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    if repeats or hint(x.shape[-1]) * x.element_size() % VECTOR == 0:
        return x.clone(memory_format=torch.contiguous_format)
    return readable(x)


def loadable(x: Tensor) -> Tensor:
    """`x` as torch's own kernels take it, which ask nothing of addresses and load vectors of 16 bytes: a copy where its
    rows begin elsewhere, and strides like those of a dense tensor where a dimension has one element.
    """
    if not addressable(x):
        x = x.clone(memory_format=torch.contiguous_format)
    for dim in range(x.dim() - 2, -1, -1):
        step = hint(x.stride(dim)) * x.element_size()
        if hint(x.shape[dim]) == 1 and (step % VECTOR or not step):
            x = x.squeeze(dim).unsqueeze(dim)
    return x
