"""Which gradients an optimizer of this package takes."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InputError


def with_gradients(owner: str, params: Iterable[Tensor]) -> list[Tensor]:
    """The parameters that have a gradient.  Raises InputError, before anything is written, for one that is no dense
    tensor of real floating-point numbers.
    """
    chosen = [p for p in params if p.grad is not None]
    for p in chosen:
        for name, t in (("parameter", p), ("gradient", p.grad)):
            reason = _why_not(t)
            if reason is not None:
                raise InputError(f"{owner}: a {name} of shape {tuple(p.shape)} is {reason}")
    return chosen


def _why_not(t: Any) -> str | None:
    if hasattr(t, "device_mesh"):
        return "a DTensor; needs plain tensors. Use torch's own for sharded parameters."
    if t.layout != torch.strided:
        return f"sparse ({t.layout}); needs dense tensors. Use sparse=False, or torch.optim.SparseAdam."
    if not t.is_floating_point():
        return f"{t.dtype}; needs bfloat16, float16 or float32."
    return None
