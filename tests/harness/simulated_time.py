"""A clock that moves only when it is read or slept on: times in tests follow from the program, not from the machine.

Two runs of a test read the same times, however busy the machine is. Work that a test wants to be slow sleeps, through
a module whose `time` is this clock.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

import pytest

READING_NS = 1_000_000  # a reading takes a millisecond, so that no span is empty

# Modules that time a callable
BENCH = ("tilewright.bench.clock", "tilewright.bench.timing")

# Modules that decide something by the clock, in the order in which `optimize` reaches them.
ASSISTANT = (
    "tilewright.assistant.loop",
    "tilewright.assistant.trial",
    "tilewright.assistant.timing.measure",
    "tilewright.assistant.timing.clocks",
    "tilewright.assistant.timing.threads",
    "tilewright.assistant.observation.observe",
    *BENCH,
    "tests.assistant.planted",
)


class SimulatedTime:
    """Stands for the module `time`: its clocks show one and the same simulated time, `sleep` moves it."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.others_ns = 0  # what other processes took of it

    def perf_counter_ns(self) -> int:
        """Nanoseconds since this clock was made."""
        self.now_ns += READING_NS
        return self.now_ns

    def perf_counter(self) -> float:
        """Seconds since this clock was made."""
        return self.perf_counter_ns() / 1e9

    def process_time_ns(self) -> int:
        """Nanoseconds that this process had the core."""
        self.now_ns += READING_NS
        return self.now_ns - self.others_ns

    def take_away(self, seconds: float) -> None:
        """Let another process have the core."""
        self.now_ns += int(seconds * 1e9)
        self.others_ns += int(seconds * 1e9)

    def monotonic(self) -> float:
        """The same seconds: this clock is never set."""
        return self.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Move the clock; returns at once."""
        self.now_ns += int(seconds * 1e9)


def simulate_time(monkeypatch: pytest.MonkeyPatch, modules: Iterable[str] = ASSISTANT) -> SimulatedTime:
    """Give `modules` one simulated clock in place of `time` until the test ends."""
    simulated = SimulatedTime()
    for module in modules:
        monkeypatch.setattr(importlib.import_module(module), "time", simulated)
    return simulated
