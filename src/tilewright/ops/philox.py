"""Random integers that are a function of a key and a counter: Philox 4x32 with 10 rounds, in plain torch.

Triton's `tl.philox` is the same function.   Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.

Ops that drop by it compare the upper 31 bits of a word: p is rounded to a multiple of 2^-31.
"""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch.arguments import as_int
from tilewright.errors import InputError

MASK = 0xFFFFFFFF
"""The low 32 bits of an int64."""


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random integers of 32 bits, in int64, for each counter (c0, c1, c2, c3) of 32-bit words; the key is the
    int64 seed.
    """
    return philox_of_words((seed & MASK, (seed >> 32) & MASK), c0, c1, c2, c3)


def philox_of_words(
    key: tuple[Tensor, Tensor], c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same for a key of two words."""
    k0, k1 = key
    for _ in range(10):
        (high0, low0), (high1, low1) = _product(c0, 0xD2511F53), _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of a product of two, from two products of 48 bits: that of 64 bits overflows, which is
    undefined in C++, so a compiler may assume that it is positive.
    """
    low = (word & 0xFFFF) * factor
    rest = (word >> 16) * factor + (low >> 16)
    return rest >> 16, ((rest & 0xFFFF) << 16) | (low & 0xFFFF)


def last_dropped(p: float) -> int:
    """The largest of the 31-bit random numbers that drop an element; -1 where none does."""
    return round(p * 2**31) - 1


def scale_of(p: float) -> float:
    """1 / (1 - p), and 0 where nothing is left."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def as_number(op: str, name: str, value: Tensor | int) -> Any:
    """`value`, a seed or an offset: the tensor, or Python's int.  Raises InputError for what is neither."""
    if isinstance(value, Tensor):
        return value
    number = as_int(op, name, value)
    if type(number) is int and not -(2**63) <= number < 2**63:
        raise InputError(f"{op}: {name} is {number}; needs an integer of 64 bits, -2^63 to 2^63 - 1.")
    return number


def on_device(op: str, name: str, value: Tensor | int, x: Tensor) -> Tensor:
    """`value`, a seed or an offset, as a () int64 tensor beside x."""
    number = as_number(op, name, value)
    return number if isinstance(number, Tensor) else torch.full((), number, dtype=torch.int64, device=x.device)


def start_of(op: str, offset: Tensor | int, x: Tensor) -> Tensor | None:
    """The offset beside x; None for the number 0."""
    return None if type(offset) is int and offset == 0 else on_device(op, "offset", offset, x)


def check_seeds(op: str, x: Tensor, seed: Tensor, offset: Tensor | None) -> None:
    """Raise InputError unless both are () int64 beside x."""
    for name, t in (("seed", seed), ("offset", offset)):
        if t is not None and (t.dtype != torch.int64 or t.dim() != 0 or t.device != x.device):
            raise InputError(
                f"{op}: {name} is {t.dtype} {tuple(t.shape)} on {t.device}; needs an int, or int64 () on {x.device}."
            )
