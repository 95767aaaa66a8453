"""The difference of two tensors, and their size in bytes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InputError


def calc_diff(x: Tensor, y: Tensor) -> Tensor:
    """1 - 2 <x, y> / (<x, x> + <y, y>) in float64: 0 for equal tensors, about half the squared relative error for close
    ones.

    Returns a tensor without dimensions; NaN if either has a NaN or an infinity, so that `< tolerance` fails. It is one
    number for all elements: a wrong corner of a large result hardly changes it. Raises InputError for different shapes.
    """
    if x.shape != y.shape:
        raise InputError(f"calc_diff: x is {tuple(x.shape)}, y is {tuple(y.shape)}; needs one shape.")
    x, y = x.double(), y.double()
    total = (x * x + y * y).sum()
    return torch.where(total == 0, 0.0, 1 - 2 * (x * y).sum() / total)


def assert_bitwise_equal(x: Tensor, y: Tensor) -> None:
    """Raises AssertionError unless both have one shape, dtype and bits: equal NaNs pass, 0.0 and -0.0 do not."""
    assert x.shape == y.shape, f"x is {tuple(x.shape)}, y is {tuple(y.shape)}"
    assert x.dtype == y.dtype, f"x is {x.dtype}, y is {y.dtype}"
    different = int((_bytes(x) != _bytes(y)).sum())
    assert not different, f"{different} of {x.numel() * x.element_size()} bytes differ"


def count_bytes(*tensors: Tensor | Sequence[Any] | None) -> int:
    """Bytes of all elements of the tensors given, in lists and tuples too; None counts nothing."""
    return sum(t.nbytes if isinstance(t, Tensor) else count_bytes(*t) for t in tensors if t is not None)


def _bytes(t: Tensor) -> Tensor:
    return t.detach().contiguous().reshape(-1).view(torch.uint8)
