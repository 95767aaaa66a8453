"""Elements in the order of memory: an elementwise op takes tensors of one order as flat runs, whatever their shape."""

import torch
from torch import Tensor


def is_dense(t: Tensor) -> bool:
    """Do the elements fill one run of memory, in some order of the dimensions?"""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def has_order(t: Tensor, other: Tensor) -> bool:
    """Does element i of `t` in memory belong to element i of `other`, a dense tensor of the same shape?"""
    return all(n == 1 or a == b for n, a, b in zip(t.shape, t.stride(), other.stride(), strict=True))


def ordered_as(t: Tensor, dense: Tensor) -> Tensor:
    """`t` itself where it has the order of `dense`, else its copy in that order."""
    if has_order(t, dense):
        return t
    return torch.empty_strided(dense.shape, dense.stride(), dtype=t.dtype, device=t.device).copy_(t)


def positions(t: Tensor) -> Tensor:
    """The place of each element in memory, int64 of the shape of `t`; of a tensor that is not dense, the place that it
    has in a contiguous one.
    """
    count = torch.arange(t.numel(), device=t.device)
    return count.as_strided(t.shape, t.stride()) if is_dense(t) else count.view(t.shape)
