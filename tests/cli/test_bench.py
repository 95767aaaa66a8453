"""`bench`, `calibrate`: measurements, and where they go."""

import json
from dataclasses import replace

import pytest
import torch

from tilewright.bench import calibrate as calibration
from tilewright.bench.cases import suites
from tilewright.bench.schema import load
from tilewright.dispatch.tables import table

TINY = ("norm", "rms_norm", "--case", "M=8,N=64", "--dtype", "fp32", "--against", "eager", "--device", "cpu")


def test_a_run_writes_json_and_a_table_and_its_page_is_rendered(tilewright, place):
    done = tilewright("bench", *TINY, "--json", "results/cpu/norm.json", "--write-table", "--table", "tables/mine.json")
    assert done.exit_code == 0, done.stderr
    assert "rms_norm custom float32 fwd" in done.stdout
    rows = load(place / "results/cpu/norm.json").rows
    assert [(row.op, row.params, row.direction) for row in rows] == [
        ("rms_norm", {"M": 8, "N": 64}, "fwd"),
        ("rms_norm", {"M": 8, "N": 64}, "bwd"),
    ]
    assert all(set(row.peers) == {"eager"} for row in rows)
    _, stored = table.read(place / "tables/mine.json")
    assert {row.op for row in stored} == {"rms_norm"}

    done = tilewright("bench", "--report", "--results", "results", "--output", "pages/performance")
    assert done.exit_code == 0
    assert "rms_norm" in (place / "pages/performance/norm.md").read_text()
    assert "[norm](norm.md#cpu-norm)" in (place / "pages/performance/README.md").read_text()


def test_json_alone_on_stdout(tilewright):
    done = tilewright("bench", *TINY, "--json", "-")
    assert json.loads(done.stdout)["kind"] == "bench"
    assert "rms_norm custom float32 fwd" in done.stderr


def test_a_wrong_kernel_fails_the_run_and_the_failure_is_kept(tilewright, place, broken_kernel):
    done = tilewright("bench", *TINY, "--json", "norm.json", "--write-table", "--table", "table.json")
    assert done.exit_code == 1
    assert "FAILED rms_norm custom float32" in done.stderr
    failures = json.loads((place / "norm.json").read_text())["failures"]
    assert {failure["name"] for failure in failures} == {broken_kernel}
    assert not (place / "table.json").exists()


def test_help_names_every_suite(tilewright):
    described = tilewright("bench", "--help").stdout
    assert all(suite in described for suite in suites())


def test_calibrate_stores_what_it_measured(tilewright, place, monkeypatch):
    grid = replace(
        calibration.CPU_QUICK, traffic=(1 << 16, 1 << 20), m=(1, 32), n=(64, 128), k=(64, 128), dtypes=(torch.float32,),
        s=(32, 64), held_traffic=(1 << 18,), held_matmul=((8, 96, 96),), held_s=(48,),
    )  # fmt: skip
    monkeypatch.setattr(calibration, "CPU_QUICK", grid)
    monkeypatch.setattr(calibration.OtherLoad, "busy", False)  # or nothing is kept
    done = tilewright("calibrate", "--quick", "--device", "cpu", "--json", "-")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["quick"] is True
    [stored] = (place.parent / "cache" / "ceilings").iterdir()
    assert json.loads(stored.read_text()) == found


@pytest.mark.parametrize("timing", ["sustained", "paused"])
def test_timing_is_one_of_two(tilewright, timing):
    """Known to the parser: the run is refused for its suite, not for its timing."""
    assert "no bench suite" in tilewright("bench", "nope", "--timing", timing).stderr
