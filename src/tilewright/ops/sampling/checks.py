"""Checks and samples that the ops of this family share."""

from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.sampling.numbers import MAX_TOKENS

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check_rows(op: str, name: str, x: object, form: str = "(B, V)", dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Raise InputError unless x has this form, one of these dtypes and 1 to MAX_TOKENS columns, and no gradient."""
    if not isinstance(x, Tensor):
        raise InputError(f"{op}: {name} is a {type(x).__name__}; needs a torch.Tensor {form}.")
    if x.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InputError(f"{op}: {name} is {x.dtype}; needs one of {allowed}. Cast it first.")
    dims = form.count(",") + 1
    if x.dim() != dims:
        raise InputError(f"{op}: {name} is {tuple(x.shape)}; needs {form}.")
    if not 1 <= x.shape[-1] <= MAX_TOKENS:
        raise InputError(f"{op}: {name} is {tuple(x.shape)}; the last dimension may be 1 to {MAX_TOKENS}.")
    refuse_gradient(op, name, x)


def refuse_gradient(op: str, name: str, x: Tensor) -> None:
    """Raise InputError for a tensor that requires a gradient, where the op has none."""
    if torch.is_grad_enabled() and x.requires_grad:
        raise InputError(f"{op}: {name} requires a gradient, and the op has none. Use {name}.detach() or no_grad().")


def check_like(op: str, name: str, t: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise InputError unless t is a tensor of this shape, dtype and device."""
    if not isinstance(t, Tensor):
        raise InputError(f"{op}: {name} is a {type(t).__name__}; needs a tensor {tuple(shape)} of {dtype}.")
    if tuple(t.shape) != tuple(shape) or t.dtype != dtype:
        raise InputError(f"{op}: {name} is {tuple(t.shape)} {t.dtype}; needs {tuple(shape)} {dtype}.")
    if t.device != device:
        raise InputError(f"{op}: {name} is on {t.device}, the first tensor on {device}. Move them to one device.")
    refuse_gradient(op, name, t)


def split(parameter: Any, neutral: float) -> tuple[Tensor | None, Any]:
    """(tensor, number) of a parameter that is one of them, or None for `neutral`."""
    if isinstance(parameter, Tensor):
        return parameter, neutral
    return None, neutral if parameter is None else parameter


def logits(m: int, n: int, dtype: torch.dtype, device: torch.device, seed: int, scale: float = 3.0) -> Tensor:
    """Normal logits, as of a language model with `scale` 2 to 4."""
    return rows.random_tensor((m, n), dtype, device, rows.generator(seed), scale=scale)


def seeds(m: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Seeds and positions of `m` rows: random ones of 64 and of 20 bits."""
    g = rows.generator(seed + 1)
    numbers = torch.randint(-(2**63), 2**63 - 1, (m,), generator=g, dtype=torch.int64)
    return numbers.to(device), torch.randint(0, 1 << 20, (m,), generator=g, dtype=torch.int64).to(device)


def spoil(x: Tensor) -> None:
    """Write what logits may hold by accident, into the rows that there are: row 0 ties, 1 NaN, 2 +inf, 3 -inf in half,
    4 nothing but -inf and NaN.
    """
    n = x.shape[1]
    middle = slice(n // 2, n // 2 + 1)
    x[0:1, n // 3 :] = x[0:1, : n // 3].amax(1, keepdim=True) if n >= 3 else 1.0
    x[1:2, middle] = torch.nan
    x[2:3, n - 1 :] = torch.inf
    x[3:4, ::2] = -torch.inf
    x[4:5] = -torch.inf
    x[4:5, middle] = torch.nan
