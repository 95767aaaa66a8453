"""Measure: two models, the same calls, in turn, in one process.

The number of rounds follows from a pilot round and the time allowed, before the first sample is looked at, and is cut
short only by the clock, where the machine slows down meanwhile: choosing when to stop by the result would make the
interval a lie. Where only one copy of the model fits the device, blocks of rounds with and without the change
alternate instead of single calls.

On a CPU each sample has two times, by the wall and by the CPU (`clocks`); which of them decides follows from the share
of the time that other processes took, and the comparison says which.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from tilewright.assistant.timing.clocks import (
    Call,
    Clock,
    Reading,
    Readings,
    busy_share,
    judging_clock,
    repeats_for,
    take_turns,
)
from tilewright.assistant.workload import Workload
from tilewright.bench.timing import Ratio, Samples, interleave, paired_ratio

FEWEST_ROUNDS, MOST_ROUNDS = 6, 40
_BLOCKS = 4

Switch = Callable[[], None]
Take = Callable[[dict[str, Call], Workload, int, dict[str, int]], Readings]


@dataclass(frozen=True)
class Side:
    """A model, and what has to be called before it is in the state that is meant (None: it always is)."""

    model: nn.Module
    enter: Switch | None = None


@dataclass
class Metric:
    """One quantity of both sides: medians in `unit`, and speed-up = old / new with its 95 % interval."""

    name: str
    unit: str
    before: float
    before_low: float
    before_high: float
    after: float
    after_low: float
    after_high: float
    gain: float
    gain_low: float
    gain_high: float


@dataclass
class Comparison:
    """All metrics of one interleaved run; the first one decides.

    clock: "wall", or "cpu" where other processes took more than a twentieth of the time (`busy` is that share).
    """

    metrics: list[Metric]
    rounds: int
    seconds: float
    clock: Clock = "wall"
    busy: float = 0.0

    @property
    def decisive(self) -> Metric:
        """The goal: a whole request, or the forward call of a module that does not generate."""
        return self.metrics[0]


def compare(before: Side, after: Side, work: Workload, *, seconds: float, fewest: int = FEWEST_ROUNDS) -> Comparison:
    """Time both sides for about `seconds`, and for `fewest` rounds at least.

    Both must have run before: compilation and capture are no samples.
    """
    began = time.perf_counter()
    take = _take_on_cpu if work.device.type == "cpu" else _take_on_gpu
    with torch.no_grad():
        sides = {"before": before, "after": after}
        pilot = sum(_pilot(side, work) for side in sides.values())
        rounds = max(fewest, min(MOST_ROUNDS, int(seconds / pilot)))
        if before.enter is None and after.enter is None:
            old, new = calls(before.model, work), calls(after.model, work)
            # Both sides of one quantity stand next to each other, so that a disturbance longer than a call hits both.
            fns = {f"{side}:{name}": fns[name] for name in old for side, fns in (("before", old), ("after", new))}
            readings = _in_turn(fns, work, rounds, take, fewest, until=began + seconds)
        else:
            readings = _in_blocks(sides, work, rounds, take, until=began + seconds)
    busy = busy_share(readings) if work.device.type == "cpu" else 0.0
    clock = judging_clock(busy)
    samples = {
        name: Samples([sample.cpu_us if clock == "cpu" else sample.wall_us for sample in one])
        for name, one in readings.items()
    }
    fewest_samples = min(len(one.us) for one in samples.values())
    return Comparison(_metrics(samples, work), fewest_samples, time.perf_counter() - began, clock, busy)


def calls(model: nn.Module, work: Workload) -> dict[str, Callable[[], object]]:
    """What is timed. The short request is there for its difference to the full one, which is pure decoding."""
    if not work.generates:
        return {"forward": lambda: work.forward(model)}
    return {
        "prefill": lambda: work.prefill(model),
        "short": lambda: work.request(model, short_request(work)),
        "request": lambda: work.request(model),
    }


def short_request(work: Workload) -> int:
    """New tokens of the short request."""
    return max(1, work.new_tokens // 5)


def _pilot(side: Side, work: Workload) -> float:
    if side.enter is not None:
        side.enter()
    began = time.perf_counter()
    for fn in calls(side.model, work).values():
        fn()
    if work.device.type == "cuda":
        torch.cuda.synchronize(work.device)
    return time.perf_counter() - began


def _take_on_cpu(fns: dict[str, Call], work: Workload, rounds: int, repeats: dict[str, int]) -> Readings:
    for name, fn in fns.items():
        if name not in repeats:
            repeats[name] = repeats_for(fn)
    return take_turns(fns, rounds=rounds, repeats=repeats)


def _take_on_gpu(fns: dict[str, Call], work: Workload, rounds: int, repeats: dict[str, int]) -> Readings:
    timed = interleave(fns, device=work.device, rounds=rounds, warmup=0, measure="wall")
    return {name: [Reading(us, us) for us in samples.us] for name, samples in timed.items()}


def _in_turn(fns: dict[str, Call], work: Workload, rounds: int, take: Take, fewest: int, *, until: float) -> Readings:
    readings: Readings = {name: [] for name in fns}
    repeats: dict[str, int] = {}
    while rounds > 0 and (not all(readings.values()) or time.perf_counter() < until):
        count = min(rounds, fewest)
        for name, samples in take(fns, work, count, repeats).items():
            readings[name].extend(samples)
        rounds -= count
    return readings


def _in_blocks(sides: dict[str, Side], work: Workload, rounds: int, take: Take, *, until: float) -> Readings:
    readings: Readings = {}
    repeats: dict[str, int] = {}
    per_block = -(-rounds // _BLOCKS)
    for block in range(_BLOCKS):
        if block in range(2, _BLOCKS, 2) and time.perf_counter() > until:
            break  # each side has gone first as often as the other
        order = list(sides) if block % 2 == 0 else list(reversed(sides))
        for name in order:
            side = sides[name]
            if side.enter is not None:
                side.enter()
            fns = {f"{name}:{call}": fn for call, fn in calls(side.model, work).items()}
            for fn in fns.values():
                fn()  # the first call after a switch is no sample
            for call, samples in take(fns, work, per_block, repeats).items():
                readings.setdefault(call, []).extend(samples)
    return readings


def _metrics(samples: dict[str, Samples], work: Workload) -> list[Metric]:
    def both(name: str) -> tuple[Samples, Samples]:
        return samples[f"before:{name}"], samples[f"after:{name}"]

    if not work.generates:
        return [_metric("forward", "ms", both("forward"), 1e-3)]
    steps = work.new_tokens - short_request(work)
    metrics = [_metric("request", "ms", both("request"), 1e-3), _metric("prefill", "ms", both("prefill"), 1e-3)]
    if work.goal == "throughput":
        metrics.insert(0, _rate(metrics[0], "throughput", "tokens/s", 1e3 * work.batch * work.new_tokens))
    if steps:
        decode = tuple(
            Samples(
                [
                    max(full - short, 1e-3) / steps
                    for full, short in zip(samples[f"{side}:request"].us, samples[f"{side}:short"].us, strict=True)
                ]
            )
            for side in ("before", "after")
        )
        metrics.append(_metric("decode", "ms/token", (decode[0], decode[1]), 1e-3))
    return metrics


def _metric(name: str, unit: str, both: tuple[Samples, Samples], scale: float) -> Metric:
    old, new = both
    gain: Ratio = paired_ratio(old, new)
    was, now = old.interval(), new.interval()
    return Metric(
        name,
        unit,
        old.median * scale,
        was.low * scale,
        was.high * scale,
        new.median * scale,
        now.low * scale,
        now.high * scale,
        gain.value,
        gain.low,
        gain.high,
    )


def _rate(time_ms: Metric, name: str, unit: str, work_per_s: float) -> Metric:
    """A time turned into a rate; the gain is the same number."""
    t = time_ms
    b, b_low, b_high, a, a_low, a_high = (
        work_per_s / ms for ms in (t.before, t.before_high, t.before_low, t.after, t.after_high, t.after_low)
    )
    return Metric(name, unit, b, b_low, b_high, a, a_low, a_high, t.gain, t.gain_low, t.gain_high)
