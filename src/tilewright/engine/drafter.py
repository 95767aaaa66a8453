"""Where the speculated tokens of a sequence come from."""

from collections.abc import Sequence
from typing import Protocol

_SIZES = (3, 2)  # tokens that have to agree
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


class PromptLookup:
    """Speculation by prompt lookup: what followed the newest tokens where they stood before will follow again.

    Code that is edited, tables, and answers that quote their prompt repeat themselves.  Tokens are looked up by their
    last 3, then their last 2; each is entered once, so a lookup costs the tokens that are new.  A draft that reaches
    the newest token goes on with itself: the text is taken to repeat.
    Source: Saxena, "Prompt lookup decoding", 2023.
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._entered = 0  # tokens whose runs are known

    def drafts(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """`count` tokens that may follow `tokens`, which are those of the last call and more; or none."""
        for end in range(self._entered + 1, len(tokens)):  # not the newest run, which is looked up
            for size in _SIZES:
                if size <= end:
                    self._ends[tuple(tokens[end - size : end])] = end
        self._entered = max(self._entered, len(tokens) - 1)
        for size in _SIZES:
            before = self._ends.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if before is not None:
                period = len(tokens) - before
                return tuple(tokens[before + i % period] for i in range(count))
        return ()
