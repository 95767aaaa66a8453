"""The slice of the vocabulary that a rank holds, and what it knows of targets before it has seen a logit."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from tilewright.dispatch.arguments import as_int
from tilewright.errors import InputError

IGNORED = -100
"""The target of a row without a loss, as a slice sees it: a local class may have the caller's `ignore_index`."""


class VocabSlice(NamedTuple):
    """The classes first, ..., first + size - 1 of `classes`."""

    first: int
    size: int
    classes: int
    longest: int  # the size of the first rank's slice
    group: dist.ProcessGroup | None  # None: the default one

    def of(self, class_weight: Tensor | None) -> Tensor | None:
        """The weights of this rank's classes."""
        return None if class_weight is None else class_weight[self.first : self.first + self.size]


class Labels(NamedTuple):
    """The targets of rows; all are (M,)."""

    column: Tensor  # int64, that of the target; 0 where another rank has it
    is_own: Tensor  # bool: this rank has it
    is_row: Tensor  # bool: not ignored
    weight: Tensor  # of the class; 0 in ignored rows, NaN for an index that is no class

    def rows(self, chunk: slice) -> "Labels":
        """Those of some rows."""
        return Labels(*(t[chunk] for t in self))


def labels_of(
    part: VocabSlice, target: Tensor, class_weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Labels:
    """What a slice knows of targets (M,).   dtype: of the weights."""
    target = target.to(torch.int64)
    is_row = target != ignore_index
    is_class = (target >= 0) & (target < part.classes)
    index = target - part.first
    is_own = is_row & is_class & (index >= 0) & (index < part.size)
    if class_weight is None:
        weight = torch.ones_like(target, dtype=dtype)
    else:
        weight = class_weight.detach().to(dtype)[torch.where(is_class, target, 0)]
    weight = torch.where(is_row, torch.where(is_class, weight, torch.nan), 0)
    return Labels(torch.where(is_own, index, 0), is_own, is_row, weight)


def local_slice(
    op: str, name: str, t: Tensor, dim: int, vocab_size: int | None, group: dist.ProcessGroup | None
) -> tuple[Tensor, VocabSlice]:
    """This rank's part of `t`, whose dimension `dim` is the vocabulary: `t` itself, or that of a DTensor."""
    sharded: Any = t
    if is_dtensor(t):
        if vocab_size is not None or group is not None:
            raise InputError(
                f"{op}: {name} is a DTensor, which has its vocab_size and its group. Drop these arguments."
            )
        if sharded.device_mesh.ndim != 1 or not sharded.placements[0].is_shard(dim % t.dim()):
            raise InputError(
                f"{op}: {name} is a DTensor placed {sharded.placements} on a mesh of {sharded.device_mesh.ndim} "
                f"dimensions; needs Shard({dim}) on a mesh of one. Redistribute it, or pass a slice and its group."
            )
        t, vocab_size, group = sharded.to_local(), t.shape[dim], sharded.device_mesh.get_group()
    elif vocab_size is None:
        raise InputError(f"{op}: vocab_size is missing; a slice of {name} needs the number of classes of all ranks.")
    elif not dist.is_initialized():
        raise InputError(f"{op}: there is no process group. Call torch.distributed.init_process_group first.")
    require_plain(op, name, t)
    vocab_size = as_int(op, "vocab_size", vocab_size)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise InputError(f"{op}: this process is no rank of the group. Call it on the ranks of the group alone.")
    longest = -(-vocab_size // world)
    if longest * (world - 1) >= vocab_size:
        raise InputError(f"{op}: {vocab_size} classes leave a rank of {world} without any. Use fewer ranks.")
    first = rank * longest
    size = min(longest, vocab_size - first)
    if t.dim() == 0 or t.shape[dim] != size:
        raise InputError(
            f"{op}: {name} is {tuple(t.shape)} on rank {rank} of {world}; needs {size} classes, from {first} on: those "
            f"of torch.chunk of all {vocab_size}."
        )
    return t, VocabSlice(first, size, vocab_size, longest, group)


def replicated(op: str, name: str, t: Tensor) -> Tensor:
    """`t`, or the tensor that every rank has of a DTensor."""
    if not is_dtensor(t):
        require_plain(op, name, t)
        return t
    replica: Any = t
    if not all(placement.is_replicate() for placement in replica.placements):
        raise InputError(
            f"{op}: {name} is a DTensor placed {replica.placements}; needs Replicate(), the same on every rank."
        )
    local: Tensor = replica.full_tensor()  # waits for a collective that is still running
    return local


def require_plain(op: str, name: str, t: object) -> None:
    """Raise InputError for what is no tensor with memory of its own, such as the result of a running collective."""
    if type(t) not in (Tensor, Parameter):
        raise InputError(f"{op}: {name} is a {type(t).__name__}; needs a tensor, or a DTensor. Wait for a collective.")


def is_dtensor(t: object) -> bool:
    """Whether `t` is a DTensor, whose import costs a second."""
    return isinstance(t, Tensor) and hasattr(t, "_local_tensor")
