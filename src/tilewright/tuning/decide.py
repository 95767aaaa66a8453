"""Turn a race into a table row: what counts as faster, and what is recorded."""

from typing import Any

from tilewright.bench.cases import Case
from tilewright.bench.statistics import Samples
from tilewright.tuning.report import Tuned
from tilewright.tuning.search import Race
from tilewright.tuning.space import Space, Trial


def decide(case: Case, space: Space, race: Race, torchs: Samples | None, min_gain: float, seconds: float) -> Tuned:
    """Pick the winner of a race if it beats the present choice by more than `min_gain` and by more than the noise."""
    present, best, ratio = space.present, race.best, race.ratio
    gain = None if ratio is None else ratio.value - 1
    if ratio is None:
        changed, note = True, f"the present choice is out: {present.reason}"
    elif best is present:
        changed, note, gain = False, "already the fastest", 0.0
    elif ratio.low <= 1:
        changed, note = False, f"{best} is not faster beyond the noise"
    elif ratio.value - 1 <= min_gain:
        changed, note = False, f"{best} gains less than {100 * min_gain:g}%"
    else:
        changed, note = True, "faster"
    after = best if changed else present
    row = {
        "op": case.contract.name,
        "direction": case.direction,
        "bucket": space.bucket,
        "dtype": space.dtype,
        "numerics": "default",
        "backend": after.backend,
        "config": after.row,
        "us": digits(race.samples[after].median, 5),
        "noise": digits(race.samples[after].spread, 3),
        "torch_us": None if torchs is None else digits(torchs.median, 5),
        "runner_up": _runner_up(after, race.samples),
    }
    key = (case.contract.name, case.workload.name, case.direction, space.bucket, space.dtype)
    return Tuned(*key, present, space.why, after, gain, changed, note, row, space.trials, seconds)


def _runner_up(winner: Trial, samples: dict[Trial, Samples]) -> dict[str, Any] | None:
    """The best of the other backends."""
    others = [trial for trial in samples if trial.backend != winner.backend]
    if not others:
        return None
    best = min(others, key=lambda trial: samples[trial].median)
    return {"backend": best.backend, "config": best.row, "us": digits(samples[best].median, 5)}


def digits(value: float, count: int) -> float:
    """Round to significant digits: more are noise."""
    return float(f"{value:.{count}g}")
