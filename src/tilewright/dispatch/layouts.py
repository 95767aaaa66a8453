"""Tensors that are no strided memory, refused by name: sparse ones, nested ones, those of another library's layout.

Shape, strides and address are what every op reads first, and of such tensors torch has none: it would answer with
internal errors, at another place for each kind.
"""

from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InputError


def refuse_layout(op: str, **arguments: Any) -> None:
    """Raise InputError if one of the arguments, or of a list among them, is a tensor without strides."""
    for name, value in arguments.items():
        for t in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(t, Tensor) and (t.is_nested or t.layout is not torch.strided):
                what, advice = _words(t)
                raise InputError(f"{op}: {name} is {what}; needs a dense tensor (torch.strided). {advice}")


def _words(t: Tensor) -> tuple[str, str]:
    if t.is_nested:
        return f"a nested tensor ({t.layout})", "Pad it with to_padded_tensor, or call the op on its values()."
    kind = "sparse" if "sparse" in str(t.layout) else "stored"
    return f"{kind} ({t.layout})", "Call .to_dense() first."
