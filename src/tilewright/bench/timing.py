"""Interleaved timing of several callables in one process: times from separate runs are not compared.

Each round takes one sample of every callable, forwards in even rounds and backwards in odd ones (A B C, C B A, ...),
so that clocks, temperature and power limit treat all alike and a ratio can be taken round by round. A sample is a
batch of calls long enough for the clock.

On a GPU the default measure is device time: before each batch the device spins while the host enqueues it, so that
launch overhead of a host-bound callable is not counted. `measure="wall"` counts it: the right choice for a model.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tilewright.bench.clock import Clock, Measure, clock_for
from tilewright.bench.statistics import Interval, Ratio, Samples, paired_ratio
from tilewright.errors import InputError

__all__ = ["Interval", "Ratio", "Samples", "host_us", "interleave", "paired_ratio", "rounds_order"]

Call = Callable[[], object]
Timing = Literal["sustained", "paused"]

PAUSE_S = 0.01  # long enough for the power controller to raise the clocks again
_WAKING_US = 2000.0  # a host that slept launches its first kernel 100 to 350 us late
_MAX_CALLS = 1000
_FEWEST_ROUNDS = 5  # for a median with an interval
_PROBE_BELOW_US = 5000.0  # a longer call needs no second probe: one call is a sample


@dataclass(frozen=True, slots=True)
class Plan:
    """The sampling of one callable: `calls` calls after a lead of `lead_us`.

    Each call counts as `units` units of work. us: estimated time of the calls.
    """

    fn: Call
    calls: int
    lead_us: float
    units: int = 1
    us: float = 0.0


def interleave(
    fns: Mapping[str, Call],
    *,
    device: torch.device | str,
    timing: Timing = "sustained",
    rounds: int = 30,
    warmup: int = 3,
    measure: Measure = "device",
    sample_us: float = 400.0,
    limit_s: float | None = None,
) -> dict[str, Samples]:
    """Time every callable in alternating round-robin order.

    timing: "sustained" enqueues samples back to back (a GPU may hit its power limit), "paused" idles 10 ms before
    each sample. rounds: samples per callable. warmup: untimed calls of each, first. sample_us: shortest batch; calls
    per batch follow from it. limit_s: rounds that would take longer in all are cut, to no fewer than five. Callables
    choose their own inputs: wrap them in `rotation.rotate` for a cold L2, pass them as they are for a warm one.
    """
    if not fns:
        raise InputError("interleave: no callables given")
    if rounds < 1 or warmup < 0:
        raise InputError(f"interleave: needs rounds >= 1 and warmup >= 0, got rounds={rounds}, warmup={warmup}")
    if timing not in ("sustained", "paused"):
        raise InputError(f'interleave: timing is "sustained" or "paused", got {timing!r}')
    clock = clock_for(torch.device(device), measure)
    with _no_collector():
        plans = {name: _plan(fn, clock, warmup, sample_us) for name, fn in fns.items()}
        if limit_s is not None:
            rounds = _affordable(plans.values(), rounds, limit_s, pause_s=PAUSE_S if timing == "paused" else 0.0)
        return run_rounds(plans, clock, rounds=rounds, timing=timing)


def run_rounds(
    plans: Mapping[str, Plan],
    clock: Clock,
    *,
    rounds: int,
    timing: Timing = "sustained",
    before: Call | None = None,
) -> dict[str, Samples]:
    """The timing loop of eager and graph timing. `before` runs untimed before each sample."""
    spans: dict[str, list[tuple[Any, Any]]] = {name: [] for name in plans}
    clock.synchronize()
    for index in range(rounds):
        for name in rounds_order(list(plans), index):
            plan = plans[name]
            if timing == "paused":
                clock.synchronize()
                time.sleep(PAUSE_S)
            if before is not None:
                before()
            clock.lead(plan.lead_us if timing == "sustained" else max(plan.lead_us, _WAKING_US))
            start = clock.mark()
            for _ in range(plan.calls):
                plan.fn()
            spans[name].append((start, clock.mark()))
    clock.synchronize()
    return {
        name: Samples([clock.elapsed_us(*span) / (plans[name].calls * plans[name].units) for span in marks])
        for name, marks in spans.items()
    }


def host_us(fn: Call, *, device: torch.device | str, rounds: int = 20, calls: int = 10) -> Samples:
    """Host time to enqueue one call, in microseconds; the device is drained before each batch of calls."""
    target = torch.device(device)
    clock = clock_for(target)
    fn()
    samples = []
    with _no_collector():
        for _ in range(rounds):
            clock.synchronize()
            start = time.perf_counter_ns()
            for _ in range(calls):
                fn()
            samples.append((time.perf_counter_ns() - start) / 1e3 / calls)
    clock.synchronize()
    return Samples(samples)


def rounds_order(names: Sequence[str], index: int) -> list[str]:
    """Order of round `index`: given order, then reversed, in turn."""
    return list(names) if index % 2 == 0 else list(reversed(names))


def _plan(fn: Call, clock: Clock, warmup: int, sample_us: float) -> Plan:
    for _ in range(warmup):
        fn()
    device_us, host = _probe(fn, clock, calls=1)
    if device_us < _PROBE_BELOW_US:
        device_us, host = _probe(fn, clock, calls=max(3, min(50, int(2000 / device_us))))
    calls = min(_MAX_CALLS, math.ceil(sample_us / device_us))
    return Plan(fn, calls, lead_us=lead_for(host, device_us, calls), us=calls * device_us)


def _affordable(plans: Collection[Plan], rounds: int, limit_s: float, pause_s: float) -> int:
    """Number of rounds, at most `rounds`, that fit into `limit_s` seconds."""
    round_s = sum(plan.lead_us + plan.us for plan in plans) / 1e6 + pause_s * len(plans)
    return min(rounds, max(_FEWEST_ROUNDS, int(limit_s / round_s)))


def lead_for(host: float, device_us: float, calls: int) -> float:
    """Device spin, in us, that keeps the host ahead: its first enqueue, plus its lag over the batch, plus a quarter."""
    return 1.25 * (host + calls * max(0.0, host - device_us))


def _probe(fn: Call, clock: Clock, calls: int) -> tuple[float, float]:
    """(device us, host us) per call. A probe of one call still includes host time; with several, a spin hides it."""
    clock.synchronize()
    if calls > 1:
        clock.lead(2000.0)
    start = clock.mark()
    enqueued = time.perf_counter_ns()
    for _ in range(calls):
        fn()
    host = (time.perf_counter_ns() - enqueued) / 1e3 / calls
    end = clock.mark()
    clock.synchronize()
    return max(clock.elapsed_us(start, end) / calls, 1e-3), host


@contextmanager
def _no_collector() -> Iterator[None]:
    """Disable the garbage collector inside the block: a collection would be charged to the running callable."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
