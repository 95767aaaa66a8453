"""Medians, bootstrap intervals and ratios on samples whose truth is known."""

import math

import numpy as np
import pytest

from tilewright.bench.statistics import Samples, geometric_mean, paired_ratio
from tilewright.errors import InputError


def _skewed(rng: np.random.Generator, scale: float, size: int) -> list[float]:
    """Timing-like noise: never below `scale`, sometimes far above; its median is scale * (1 + 0.05)."""
    return list(scale * (1 + 0.05 * np.exp(rng.normal(0, 1, size))))


def test_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        interval = Samples(_skewed(rng, 10.0, 25)).interval()
        hits += interval.low <= 10.5 <= interval.high
    assert 0.90 <= hits / 300 <= 0.99


def test_interval_narrows_with_more_samples() -> None:
    rng = np.random.default_rng(2)
    assert Samples(_skewed(rng, 10.0, 400)).spread < Samples(_skewed(rng, 10.0, 15)).spread


def test_the_same_samples_give_the_same_interval() -> None:
    samples = Samples(_skewed(np.random.default_rng(3), 1.0, 20))
    assert samples.interval() == samples.interval()


def test_ratio_above_one_means_the_second_is_faster() -> None:
    ratio = paired_ratio(Samples([20.0, 22.0, 21.0]), Samples([10.0, 11.0, 10.5]))
    assert ratio.value == pytest.approx(2.0)
    assert ratio.low <= 2.0 <= ratio.high


def test_pairing_removes_drift_that_both_sides_share() -> None:
    rng = np.random.default_rng(4)
    drift = np.linspace(1.0, 3.0, 40)  # clocks fall to a third during the run
    a = Samples(list(10.5 * drift * (1 + 0.002 * rng.normal(size=40))))
    b = Samples(list(10.0 * drift * (1 + 0.002 * rng.normal(size=40))))
    ratio = paired_ratio(a, b)
    assert 1.04 < ratio.low <= ratio.high < 1.06
    assert a.interval().low < b.interval().high  # unpaired, the two could not be told apart


def test_unpaired_samples_are_refused() -> None:
    with pytest.raises(InputError, match="3 samples against 2"):
        paired_ratio(Samples([1.0, 2.0, 3.0]), Samples([1.0, 2.0]))


def test_no_samples_are_refused() -> None:
    with pytest.raises(InputError, match="no samples"):
        Samples([]).interval()


def test_geometric_mean_lets_opposite_ratios_cancel() -> None:
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert geometric_mean([1.0, 10.0, 100.0]) == pytest.approx(10.0)
    with pytest.raises(InputError):
        geometric_mean([])
    assert math.isclose(geometric_mean(iter([3.0])), 3.0)
