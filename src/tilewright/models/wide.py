"""A copy of a model in a wider number format: the reference that accuracy is measured against."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from tilewright.models.moe.experts import run_plainly


def dominant_dtype(model: nn.Module) -> torch.dtype:
    """The floating dtype that holds the most parameters."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else torch.get_default_dtype()


def wide_dtype(model: nn.Module) -> torch.dtype:
    """float32 for a half-precision model, float64 for a float32 one."""
    return torch.float64 if dominant_dtype(model) in (torch.float32, torch.float64) else torch.float32


def wide_copy(model: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Copy `model` with floating parameters and buffers of at least `dtype`; no narrow copy is made on the way.

    Tied weights stay tied, floating inputs are cast on entry. Hugging Face norms and rotary tables compute in float32
    for any input, so a float64 copy is accurate to about 1e-7, which the floor of every accuracy rule covers.
    """

    def widen(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.element_size() >= dtype.itemsize:
            return tensor.detach().to(device, copy=True)
        return tensor.detach().to(device, dtype)

    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(widen(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo.setdefault(id(buffer), widen(buffer))
    clone = copy.deepcopy(model, memo)
    run_plainly(clone)
    narrower = tuple(d for d in (torch.float16, torch.bfloat16, torch.float32) if d.itemsize < dtype.itemsize)
    cast_on_entry(clone, narrower, dtype, device)
    return clone


def cast_on_entry(
    model: nn.Module, sources: tuple[torch.dtype, ...], target: torch.dtype, device: torch.device
) -> RemovableHandle:
    """Move the inputs of `model` to `device`, and cast those of `sources` to `target`, until `.remove()` is called."""

    def convert(x: Any) -> Any:
        return x.to(device, target if x.dtype in sources else x.dtype) if isinstance(x, Tensor) else x

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(convert, (args, kwargs))

    return model.register_forward_pre_hook(hook, with_kwargs=True)


@contextmanager
def full_precision() -> Iterator[None]:
    """Disable TF32 in float32 products inside the block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
