"""The arguments of a user's launch function: their tensors by name, and copies to try configurations on."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tilewright.dispatch.replay import span
from tilewright.validate.bits import memory

_GRANULE = 512  # bytes to which torch's allocator aligns: a copy keeps a tensor's alignment

Kind = tuple[str, torch.dtype, torch.device]
"""Name of a parameter, and dtype and device of a tensor in its argument."""


def kinds(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Kind]:
    """One for each tensor of a call, in its order.   names: those of the positional parameters."""
    result: list[Kind] = []
    for i, value in enumerate(args):
        _add(result, names[min(i, len(names) - 1)], value)
    for name, value in kwargs.items():
        _add(result, name, value)
    return result


def _add(result: list[Kind], name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        result.append((name, value.dtype, value.device))
    elif isinstance(value, (list, tuple)):
        for each in value:
            _add(result, name, each)
    elif isinstance(value, dict):
        for each in value.values():
            _add(result, name, each)


def device_of(of_call: Sequence[Kind]) -> torch.device | None:
    """The device of a call: that of its first tensor on a GPU, else of its first; None without a tensor."""
    devices = [device for _, _, device in of_call]
    return next((device for device in devices if device.type != "cpu"), devices[0] if devices else None)


def dtypes_text(of_call: Sequence[Kind]) -> str:
    """The dtypes of a call as a row of a table writes them: "x=bfloat16,out=float32", each once."""
    fields = sorted({f"{name}={str(dtype).removeprefix('torch.')}" for name, dtype, _ in of_call})
    return ",".join(fields)


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors of nested containers."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def copied(values: Any) -> Any:
    """`values` with other memory behind its tensors.  Strides and alignment stay, and what shared memory still does."""
    pieces: dict[int, tuple[int, Tensor]] = {}
    for storage, tensors in _by_storage(tensors_in(values)):
        starts = [t.storage_offset() * t.element_size() for t in tensors]
        low = min(starts) // _GRANULE * _GRANULE
        high = max(start + span(t) for start, t in zip(starts, tensors, strict=True))
        pieces[storage] = low, memory(tensors[0])[low:high].clone()

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        low, piece = pieces[value.untyped_storage()._cdata]
        offset = value.storage_offset() - low // value.element_size()
        plain = torch.empty(0, dtype=value.dtype, device=value.device)
        plain = plain.set_(piece.untyped_storage(), offset, value.shape, value.stride())
        return torch._neg_view(plain) if value.is_neg() else plain

    return tree_map(copy, values)


def _by_storage(tensors: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    groups: dict[int, list[Tensor]] = {}
    for t in tensors:
        groups.setdefault(t.untyped_storage()._cdata, []).append(t)
    yield from groups.items()


def bytes_of(values: Any) -> int:
    """Bytes that the tensors of a call cover, memory that several share counted once."""
    return sum(max(span(t) for t in tensors) for _, tensors in _by_storage(tensors_in(values)))


def shares_memory(t: Tensor, others: Sequence[Tensor]) -> bool:
    """Does `t` lie in the storage of one of `others`?"""
    return any(t.untyped_storage()._cdata == other.untyped_storage()._cdata for other in others)
