"""Rotating inputs: a kernel in a model finds its operands in device memory, not in the cache that the last repetition
left warm.

Between two uses of the same input set more than twice the L2 of other data passes by. Results are held for one turn
as well: otherwise the allocator would hand the same block to every call, and writes would stay in the cache and never
be paid for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from tilewright.errors import InputError
from tilewright.hardware import device_info


def rotate(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """One callable that goes through `calls` in turn, one for each input set, and keeps each result until its next
    turn.
    """
    if not calls:
        raise InputError("rotate: no callables given")
    held: list[object] = [None] * len(calls)
    position = 0

    def turn() -> object:
        nonlocal position
        index = position
        position = (index + 1) % len(calls)
        held[index] = calls[index]()
        return held[index]

    return turn


def sets_for(bytes_touched: int, device: torch.device | str, *, at_most: int = 256) -> int:
    """Input sets needed for a cold L2 when one call reads and writes `bytes_touched` bytes; at least 2.

    `at_most` bounds the memory objects; where it binds, the caller evicts the cache between samples (see
    `graph.interleave_graphs`).
    """
    count = math.ceil(2 * device_info(device).l2_bytes / max(1, bytes_touched)) + 1
    return max(2, min(at_most, count))
