"""Rows that begin at any element: lengths that matter, rows inside poisoned memory, and how kernels load."""

import re
from collections import Counter

import pytest
import torch
from torch import Tensor

DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = (257, 263, 264, 265, 271, 511, 513, 519, 1023, 1025)
"""Around whole vectors of 16-bit elements, and around tiles of 256, 512 and 1024."""
ROWS = 9
"""Rows of odd length begin 0 to 7 elements behind a boundary, and the last one where the first does."""
POISON = 77.0


def rows_in(memory: Tensor, shape: tuple[int, int], pitch: int = 0) -> Tensor:
    """Rows inside flat `memory`, 64 elements from its beginning; `pitch` elements from one to the next."""
    return memory.as_strided(shape, (pitch or shape[1], 1), memory.storage_offset() + 64)


def poisoned(
    shape: tuple[int, int], dtype: torch.dtype, device: str, value: float = POISON, pitch: int = 0
) -> tuple[Tensor, Tensor]:
    """(memory, rows in it), every element `value`."""
    memory = torch.full((shape[0] * (pitch or shape[1]) + 128,), value, dtype=dtype, device=device)
    return memory, rows_in(memory, shape, pitch)


def filled(values: Tensor, pitch: int = 0) -> Tensor:
    """`values` (M, N) as rows between which, before and behind which memory is NaN."""
    _, rows = poisoned((values.shape[0], values.shape[1]), values.dtype, str(values.device), torch.nan, pitch)
    return rows.copy_(values)


def untouched(memory: Tensor, rows: Tensor) -> bool:
    """Is everything in `memory` but `rows` still POISON?  Overwrites the rows."""
    rows.fill_(POISON)
    return bool((memory == POISON).all())


def accesses(ptx: str) -> Counter[str]:
    """Global loads and stores of a kernel by width: {"ld v4.b32": 4, "st b16": 1}."""
    return Counter(
        f"{kind} {width}" for kind, width in re.findall(r"\b(ld|st)\.global[\w.:]*?\.((?:v\d\.)?b\d+)\b", ptx)
    )
