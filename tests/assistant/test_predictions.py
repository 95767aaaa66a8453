"""Predictions are judged: by committed measurements of models that they were not fitted to."""

import json
import statistics
from pathlib import Path

import pytest

from tilewright.assistant.changes import catalogue
from tilewright.assistant.predict import Prediction, gain_of
from tilewright.assistant.shares import share_of

ROWS = json.loads((Path(__file__).parents[2] / "benchmarks" / "predictions.json").read_text())
HELD_OUT = [row for row in ROWS if row["split"] == "held out"]
FIT = [row for row in ROWS if row["split"] == "fit"]


def prediction(row: dict) -> Prediction:
    return gain_of(row["bound_us"], row["now_us"], share_of(row["change"], row["device"]))


def covered(rows: list[dict]) -> float:
    inside = [row for row in rows if (found := prediction(row)).low <= row["gain"] <= found.high]
    return len(inside) / len(rows)


def test_no_model_is_fitted_to_and_held_out():
    assert len(HELD_OUT) >= 8
    assert {row["model"] for row in FIT}.isdisjoint(row["model"] for row in HELD_OUT)
    assert {row["change"] for row in ROWS} <= {change.name for change in catalogue()}


def test_the_median_error_on_held_out_models_is_at_most_a_fifth():
    errors = [abs(prediction(row).expected / row["gain"] - 1) for row in HELD_OUT]
    assert statistics.median(errors) <= 0.2


def test_ranges_hold_four_of_five_measurements():
    assert covered(HELD_OUT) >= 0.8
    assert covered(FIT) >= 0.8


def test_a_range_that_always_holds_says_nothing():
    """Ranges are no wider than a factor of three, and most are within a factor of one and a half."""
    widths = [(found := prediction(row)).high / found.low for row in ROWS]
    assert max(widths) < 3
    assert statistics.median(widths) < 1.5


def test_large_gains_are_told_from_none():
    large = [prediction(row).expected for row in ROWS if row["gain"] > 1.5]
    none = [prediction(row).expected for row in ROWS if 0.9 < row["gain"] < 1.1]
    assert min(large) > 1.3 > 1.1 > max(none)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_change_may_lose(device):
    for change in catalogue():
        assert gain_of(1.0, 100.0, share_of(change.name, device)).low < 1.0, change.name
