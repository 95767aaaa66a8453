"""Rotate inputs: a kernel in a model reads its operands from device memory, not from a cache warmed by the last call.

Between two uses of one input set, other data of more than twice the L2 is read or written. Results are kept for one
turn too: otherwise the allocator would return the same block to every call, and writes would never leave the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from tilewright.errors import InputError
from tilewright.hardware import device_info


def rotate(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """One callable that runs `calls` in turn, one for each input set, and keeps each result until its next turn."""
    if not calls:
        raise InputError("rotate: no callables given")
    results: list[object] = [None] * len(calls)
    position = 0

    def turn() -> object:
        nonlocal position
        index = position
        position = (index + 1) % len(calls)
        results[index] = calls[index]()
        return results[index]

    return turn


def sets_for(bytes_touched: int, device: torch.device | str, *, at_most: int = 256) -> int:
    """Input sets needed for a cold L2 when one call reads and writes `bytes_touched` bytes; at least 2.

    `at_most` bounds the memory objects; where it binds, the caller evicts the cache between samples (see
    `graph.interleave_graphs`).
    """
    count = math.ceil(2 * device_info(device).l2_bytes / max(1, bytes_touched)) + 1
    return max(2, min(at_most, count))
