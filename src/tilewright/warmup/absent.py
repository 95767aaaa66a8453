"""Fake tensors on a GPU that this machine does not have.

Indexing, `~`, `copy_` and `contiguous` make the device of a tensor current, which without that device is an error,
though nothing would be computed.  So they are replaced: the operators that indexing consists of make no device current,
and a copy into a fake tensor changes nothing.  `scaled_dot_product_attention` queries the device to choose a kernel;
only the shape and strides of its result are needed, which are those of FLASH and cuDNN.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten


class AbsentDevice(TorchFunctionMode):
    """Index and copy fake CUDA tensors inside the block without a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _REPLACED and args[0].device.type == "cuda":
            return _REPLACED[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _index(x: Tensor, index: Any) -> Tensor:
    viewed, indices = _viewed(x, index)
    result: Tensor = _aten.index.Tensor(viewed, indices) if indices else viewed
    return result


def _contiguous(x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    return x if x.is_contiguous(memory_format=memory_format) else x.clone(memory_format=memory_format)


def _viewed(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """(the view of x that ints, slices and None select, the tensor indices of its dimensions, if any)."""
    items = list(index) if isinstance(index, tuple) else [index]
    indexed_dims = sum(_dimensions(item) for item in items)
    gap = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    items[gap : gap + 1] = [slice(None)] * (x.dim() - indexed_dims)
    viewed, dim = _aten.alias(x), 0
    indices: list[Tensor | None] = []
    for item in items:
        if item is None:
            viewed = viewed.unsqueeze(dim)
        elif isinstance(item, slice):
            if item != slice(None):
                viewed = _aten.slice.Tensor(viewed, dim, item.start, item.stop, 1 if item.step is None else item.step)
        elif isinstance(item, Tensor | list):
            indices += [None] * (dim - len(indices)) + [torch.as_tensor(item, device=x.device)]
            dim += _dimensions(item) - 1
        else:
            viewed = viewed.select(dim, item)
            continue
        dim += 1
    return viewed, indices


def _dimensions(item: Any) -> int:
    """Number of dimensions of the tensor that one index consumes."""
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _attention(query: Tensor, key: Tensor, value: Tensor, *options: Any, **more: Any) -> Tensor:
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)


_REPLACED: dict[Any, Any] = {
    Tensor.__getitem__: _index,
    Tensor.__setitem__: lambda x, index, value: None,
    Tensor.copy_: lambda x, *source, **how: x,
    Tensor.contiguous: _contiguous,
    Tensor.__invert__: _aten.bitwise_not,
    F.scaled_dot_product_attention: _attention,
}
