"""Medians, bootstrap intervals and paired ratios of timing samples.

Timing noise is skewed (a sample is only ever disturbed upwards) and drifts with clocks and temperature. Hence the
median, an interval that assumes no distribution, and ratios taken inside one round, where both sides saw the same
machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tilewright.errors import InputError

_RESAMPLES = 2000
_SEED = 0  # a report rendered twice from the same samples prints the same interval


@dataclass(frozen=True, slots=True)
class Interval:
    """A closed range, in the unit of what it describes."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of one side over time of the other, with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Samples:
    """Microseconds per call, one entry per round.

    Entry i of every function in an interleaved run belongs to the same round.
    """

    us: list[float]

    @property
    def median(self) -> float:
        """Median microseconds per call."""
        return float(np.median(self.us))

    def interval(self) -> Interval:
        """Percentile bootstrap interval of the median, in microseconds."""
        return _bootstrap_median(np.asarray(self.us, dtype=np.float64))

    @property
    def spread(self) -> float:
        """Half the width of the 95 % interval over the median.

        0.01: the median is accurate to about one percent.
        """
        interval = self.interval()
        return (interval.high - interval.low) / (2 * self.median)


def paired_ratio(a: Samples, b: Samples) -> Ratio:
    """Median over rounds of a / b: above 1 means that `b` is the faster one.

    Both must come from the same interleaved run.
    """
    if len(a.us) != len(b.us):
        raise InputError(
            f"paired_ratio: {len(a.us)} samples against {len(b.us)}; "
            "only samples of one interleaved run are paired, round by round"
        )
    ratios = np.asarray(a.us, dtype=np.float64) / np.asarray(b.us, dtype=np.float64)
    interval = _bootstrap_median(ratios)
    return Ratio(float(np.median(ratios)), interval.low, interval.high)


def geometric_mean(values: Iterable[float]) -> float:
    """exp(mean(log v)): the mean under which a ratio of 2 and one of 0.5 cancel."""
    logs = [math.log(value) for value in values]
    if not logs:
        raise InputError("geometric_mean: no values")
    return math.exp(sum(logs) / len(logs))


def _bootstrap_median(values: np.ndarray) -> Interval:
    if values.size == 0:
        raise InputError("no samples: nothing was timed")
    picks = np.random.default_rng(_SEED).integers(0, values.size, size=(_RESAMPLES, values.size))
    medians = np.median(values[picks], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Interval(float(low), float(high))
