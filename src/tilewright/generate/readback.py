"""Tell the host what the GPU has produced, one report behind, so that neither waits for the other.

After a few steps the decoder posts a small report: an asynchronous copy into pinned memory and an event.  The host then waits for
the report *before* it.  While it waits, the steps of the newest report are still queued, so the GPU never runs dry; and the
host is never more than two reports ahead, so an end-of-text is noticed after a bounded number of spare steps.
"""

from collections import deque

import torch


class Readback:
    """A first-in first-out line of reports, each a copy of `source` (int64, 1-D) at the time of `post`."""

    DEPTH = 2

    def __init__(self, source: torch.Tensor) -> None:
        self._source = source
        self._asynchronous = source.is_cuda
        self._slots = [
            torch.empty(source.shape, dtype=source.dtype, pin_memory=self._asynchronous) for _ in range(self.DEPTH)
        ]
        self._events = [torch.cuda.Event() for _ in range(self.DEPTH)] if self._asynchronous else []
        self._waiting: deque[int] = deque()
        self._next = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def lag(self) -> int:
        """Reports to leave in line while steps are still being queued."""
        return 1 if self._asynchronous else 0

    def post(self) -> None:
        """Queue a report behind the work queued so far on the current stream."""
        slot = self._next
        self._next = (slot + 1) % self.DEPTH
        self._slots[slot].copy_(self._source, non_blocking=True)
        if self._asynchronous:
            self._events[slot].record()
        self._waiting.append(slot)

    def take(self) -> list[int]:
        """The oldest report, waiting for it if need be."""
        slot = self._waiting.popleft()
        if self._asynchronous:
            self._events[slot].synchronize()
        return self._slots[slot].tolist()
