"""Two clocks with one interface: the device's own time line, and the wall clock.

`EventClock` records CUDA events in the current stream, so a span is the device time between them, provided that the
host stays ahead: `lead` keeps the device busy while the host enqueues. `WallClock` waits for the device and reads the
host's clock: the time a user waits, launch overhead included, and the only choice on a CPU.
"""

from __future__ import annotations

import time
from typing import Any, Literal, Protocol

import torch

Measure = Literal["device", "wall"]

# torch.cuda._sleep spins for a number of SM cycles. SM clocks are at most about 2 GHz; a slower one only makes the lead
# longer.
_CYCLES_PER_US = 2000


class Clock(Protocol):
    """The interface of the timing loops; marks are opaque and only comparable within one clock."""

    def mark(self) -> Any: ...

    def elapsed_us(self, start: Any, end: Any) -> float: ...

    def synchronize(self) -> None: ...

    def lead(self, us: float) -> None: ...


class WallClock:
    """perf_counter, with the device drained before each reading."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def mark(self) -> int:
        self.synchronize()
        return time.perf_counter_ns()

    def elapsed_us(self, start: int, end: int) -> float:
        return (end - start) / 1e3

    def lead(self, us: float) -> None:
        """Do nothing: the wall clock counts host time on purpose."""


class EventClock:
    """CUDA events in the stream that is current when the clock is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def elapsed_us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) * 1e3

    def lead(self, us: float) -> None:
        """Spin on the device for about `us`, while the host enqueues the next work."""
        if us > 0:
            torch.cuda._sleep(int(us * _CYCLES_PER_US))


def clock_for(device: torch.device, measure: Measure = "device") -> Clock:
    """Events for device time on CUDA, else the wall clock."""
    return EventClock(device) if measure == "device" and device.type == "cuda" else WallClock(device)
