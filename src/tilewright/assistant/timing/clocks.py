"""Time calls on a CPU by two clocks at once: the wall, and the CPU time of this process.

Another process that takes the core adds to the wall time of a call and not to its CPU time. With one thread and an
idle machine the two are equal; where they are not, the CPU time is what the call would have taken alone. With several
threads CPU time is no measure of speed (threads that wait for each other spin), so there the wall decides.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Call = Callable[[], object]
Clock = Literal["wall", "cpu"]

BUSY_SHARE = 0.05  # of the wall time, taken by other processes: from here on the CPU time decides
_SAMPLE_US = 400.0  # shortest sample: several calls where one is shorter


@dataclass(frozen=True)
class Reading:
    """One sample: us per call by both clocks."""

    wall_us: float
    cpu_us: float


Readings = dict[str, list[Reading]]


def take_turns(calls: Mapping[str, Call], *, rounds: int, repeats: Mapping[str, int] | None = None) -> Readings:
    """One sample of every call in each round, forwards in even rounds and backwards in odd ones."""
    repeats = repeats or {}
    readings: Readings = {name: [] for name in calls}
    collecting = gc.isenabled()
    gc.disable()  # a collection inside a sample would be charged to whichever call happened to run
    try:
        for index in range(rounds):
            for name in list(calls) if index % 2 == 0 else list(calls)[::-1]:
                readings[name].append(_sample(calls[name], repeats.get(name, 1)))
    finally:
        if collecting:
            gc.enable()
    return readings


def repeats_for(call: Call) -> int:
    """Calls in one sample, such that it is long enough for the clock."""
    return max(1, math.ceil(_SAMPLE_US / max(_sample(call, 1).wall_us, 1e-3)))


def busy_share(readings: Readings) -> float:
    """Share of the wall time in which other processes had the core. 0 with several threads, which hide it."""
    if torch.get_num_threads() > 1:
        return 0.0
    wall = sum(sample.wall_us for samples in readings.values() for sample in samples)
    cpu = sum(sample.cpu_us for samples in readings.values() for sample in samples)
    return min(1.0, max(0.0, 1 - cpu / wall)) if wall else 0.0


def judging_clock(busy: float) -> Clock:
    """The clock to judge by where other processes took the share `busy`."""
    return "cpu" if busy > BUSY_SHARE else "wall"


def _sample(call: Call, repeats: int) -> Reading:
    wall, cpu = time.perf_counter_ns(), time.process_time_ns()
    for _ in range(repeats):
        call()
    cpu, wall = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
    return Reading(wall / 1e3 / repeats, cpu / 1e3 / repeats)
