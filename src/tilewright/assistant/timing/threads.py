"""How many threads a CPU model is measured with: the fewest that are as fast as any.

Threads of one operation wait for each other. On a small model they gain nothing, and where another process takes one
of their cores, each operation waits for the thread that lost it: a request of the demo's model took 720 ms with two
threads and 130 ms with one, on two cores with other processes (2026-11).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from tilewright.assistant.timing.clocks import Readings, take_turns
from tilewright.assistant.workload import Workload

_ROUNDS = 5
_BUDGET_SHARE = 0.04  # for choosing
_AS_FAST = 1.05  # fewer threads may be this much slower: they leave cores to others
_LARGEST = 200_000_000  # parameters: above, one thread is never as fast, and its request takes too long to try


@dataclass(frozen=True)
class Threads:
    """The chosen number, and the median wall time of a request in ms for each number that was tried."""

    count: int
    request_ms: dict[int, float] = field(default_factory=dict)

    @property
    def note(self) -> str:
        """What to tell the user; "" where the number is the one that was set."""
        if not self.request_ms or self.count == max(self.request_ms):
            return ""
        times = ", ".join(f"{ms:.4g} ms with {count}" for count, ms in sorted(self.request_ms.items()))
        return f"Measured with torch.set_num_threads({self.count}): a request takes {times} here."


@contextmanager
def restored_threads() -> Iterator[None]:
    """The number of threads is at the end what it was at the beginning."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def choose_threads(model: nn.Module, work: Workload, *, budget_s: float) -> Threads:
    """Time a request with the current number of threads and with its halves, and set the best number."""
    current = torch.get_num_threads()
    large = sum(parameter.numel() for parameter in model.parameters()) > _LARGEST
    if work.device.type != "cpu" or current == 1 or large:
        return Threads(current)
    call: Callable[[], object] = (lambda: work.request(model)) if work.generates else (lambda: work.forward(model))
    limit = _BUDGET_SHARE * budget_s
    with torch.no_grad():
        torch.set_num_threads(1)
        began = time.perf_counter()
        call()
        counts = _halves(current)
        timed = {str(count): _with_threads(count, call) for count in counts}
        readings: Readings = {name: [] for name in timed}
        for _ in range(_ROUNDS):  # one at a time: with several threads a busy machine may take fifty times as long
            for name, samples in take_turns(timed, rounds=1).items():
                readings[name].extend(samples)
            if time.perf_counter() - began > limit:
                break
    request_ms = {
        int(name): statistics.median(sample.wall_us for sample in samples) / 1e3 for name, samples in readings.items()
    }
    best = min(request_ms.values())
    chosen = min(count for count, ms in request_ms.items() if ms <= _AS_FAST * best)
    torch.set_num_threads(chosen)
    return Threads(chosen, request_ms)


def _halves(count: int) -> list[int]:
    counts = [count]
    while counts[-1] > 1:
        counts.append(counts[-1] // 2)
    return counts


def _with_threads(count: int, call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        torch.set_num_threads(count)
        call()

    return run
