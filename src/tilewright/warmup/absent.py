"""Fake tensors on a GPU that is not here.

Indexing, `copy_` and `contiguous` make the device of a tensor current, which without that device is an error, though
nothing would be computed.  So they are said in other words: the operators that indexing consists of make no device
current, and a copy into a fake tensor changes nothing.  `scaled_dot_product_attention` asks that device for a kernel;
of its result only shape and strides are needed, which are those of FLASH and cuDNN.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten


class AbsentDevice(TorchFunctionMode):
    """Inside the block, fake tensors of a GPU can be indexed and copied without one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ANSWERED and args[0].device.type == "cuda":
            return _ANSWERED[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _index(x: Tensor, index: Any) -> Tensor:
    viewed, places = _viewed(x, index)
    result: Tensor = _aten.index.Tensor(viewed, places) if places else viewed
    return result


def _contiguous(x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    return x if x.is_contiguous(memory_format=memory_format) else x.clone(memory_format=memory_format)


def _viewed(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """(x after all that makes a view of it, indices of its dimensions by tensors; none where there is no such one)."""
    items = list(index) if isinstance(index, tuple) else [index]
    indexed_dims = sum(_dimensions(item) for item in items)
    gap = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    items[gap : gap + 1] = [slice(None)] * (x.dim() - indexed_dims)
    viewed, dim = _aten.alias(x), 0
    places: list[Tensor | None] = []
    for item in items:
        if item is None:
            viewed = viewed.unsqueeze(dim)
        elif isinstance(item, slice):
            if item != slice(None):
                viewed = _aten.slice.Tensor(viewed, dim, item.start, item.stop, 1 if item.step is None else item.step)
        elif isinstance(item, Tensor | list):
            places += [None] * (dim - len(places)) + [torch.as_tensor(item, device=x.device)]
            dim += _dimensions(item) - 1
        else:
            viewed = viewed.select(dim, item)
            continue
        dim += 1
    return viewed, places


def _dimensions(item: Any) -> int:
    """How many dimensions of a tensor an index stands for."""
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _attention(query: Tensor, key: Tensor, value: Tensor, *options: Any, **more: Any) -> Tensor:
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)


_ANSWERED: dict[Any, Any] = {
    Tensor.__getitem__: _index,
    Tensor.__setitem__: lambda x, index, value: None,
    Tensor.copy_: lambda x, *source, **how: x,
    Tensor.contiguous: _contiguous,
    F.scaled_dot_product_attention: _attention,
}
