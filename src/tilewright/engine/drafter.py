"""Where the speculated tokens of a sequence come from."""

from collections.abc import Sequence
from typing import Protocol

UNKNOWN = -1
"""A draft that the device makes in the step itself, before its target computes it."""


class Drafter(Protocol):
    """What one sequence speculates with."""

    def drafts(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """`count` tokens that may follow `tokens`; or none."""
        ...


class DeviceDrafter:
    """Leaves drafts to a model on the device: as many as may be."""

    def drafts(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """`count` unknown tokens."""
        return (UNKNOWN,) * count
