"""Bit patterns: equality that tells -0.0 from 0.0 and takes NaN as a value, and copies that keep a tensor's layout."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(t: Tensor) -> Tensor:
    """The elements of `t` as integers of the same width, contiguous."""
    return t.detach().resolve_neg().contiguous().view(_INTEGER[t.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Same shape, dtype and bit pattern."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def other_bits(a: Tensor, b: Tensor) -> Tensor:
    """True where two tensors of one shape and dtype differ in their bits and are not both NaN."""
    both_nan = a.isnan() & b.isnan() if a.is_floating_point() else torch.zeros_like(a, dtype=torch.bool)
    return (bits(a) != bits(b)) & ~both_nan


def memory(t: Tensor) -> Tensor:
    """Every byte of the storage of `t`, gaps and neighbours of the view included; shares memory with it."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def replica(t: Tensor) -> Tensor:
    """Copy `t` with its storage: the same strides, alignment, surroundings and negative bit."""
    if t.is_neg():
        return torch._neg_view(replica(torch._neg_view(t)))
    storage = memory(t).clone().untyped_storage()
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, t.storage_offset(), t.shape, t.stride())


def replicas(values: Any) -> Any:
    """Replace every tensor in `values` by its replica."""
    return tree_map(lambda v: replica(v) if isinstance(v, Tensor) else v, values)
