"""Report the GPU's tokens to the host with a delay of one report, so that neither waits for the other.

After a few steps the decoder posts a small report: an asynchronous copy into pinned memory and an event. The host
then waits for the report *before* it. While it waits, the steps of the newest report are still queued, so the GPU
is never idle; and the host is never more than two reports ahead, so an end-of-text is noticed after a bounded number
of spare steps.
"""

from collections import deque
from typing import Any

import torch


class Readback:
    """A first-in first-out queue of reports, each a copy of `source` (int64, 1-D) at the time of `post`."""

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

    @property
    def lag(self) -> int:
        """Reports that stay in the queue while steps are queued."""
        return 1 if self._asynchronous else 0

    def post(self) -> None:
        """Queue a report after the work queued so far on the current stream."""
        slot = self._next
        self._next = (slot + 1) % self.DEPTH
        self._slots[slot].copy_(self._source, non_blocking=True)
        if self._asynchronous:
            self._events[slot].record()
        self._waiting.append(slot)

    def take(self) -> list[int]:
        """Return the oldest report; wait for it if necessary."""
        slot = self._waiting.popleft()
        if self._asynchronous:
            self._events[slot].synchronize()
        report: list[int] = self._slots[slot].tolist()
        return report

    def __len__(self) -> int:
        return len(self._waiting)

    def clear(self) -> None:
        """Drop all queued reports."""
        self._waiting.clear()


class Progress:
    """Reads the reports of one call: the length of the sequence and whether it continues; streams new tokens.

    A report is [some row still runs, length of the sequence, newest token of each row] (`DecodeState.report`).
    """

    def __init__(self, reports: Readback, input_ids: torch.Tensor, streamer: Any) -> None:
        reports.clear()
        self._reports = reports
        self._streamer = streamer
        self.length = input_ids.shape[1]
        self.running = True
        if streamer is not None:
            streamer.put(input_ids.cpu())

    def post(self) -> None:
        """Queue a report, and read the older ones that are due."""
        self._reports.post()
        self._read(self._reports.lag)

    def finish(self) -> int:
        """Read the remaining reports. Returns the length of the sequence."""
        self._read(0)
        if self._streamer is not None:
            self._streamer.end()
        return self.length

    def _read(self, leave: int) -> None:
        while len(self._reports) > leave:
            running, length, *tokens = self._reports.take()
            if self._streamer is not None and length > self.length:
                self._streamer.put(torch.tensor(tokens))
            self.running, self.length = bool(running), length
