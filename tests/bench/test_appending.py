"""Older result files stay readable, and one suite can be measured in two runs on one machine."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tests.bench.test_report import LOST, MACHINE, WON
from typer.testing import CliRunner

from tilewright.bench.cases import select
from tilewright.bench.machine import describe
from tilewright.bench.schema import Note, Results, appended, check_same_machine, load
from tilewright.cli import app
from tilewright.errors import InputError, UsageError

GPU_MACHINE = {**MACHINE, "cuda": "13.0"}
TINY = ("bench", "norm", "rms_norm", "--case", "M=8,N=64", "--against", "eager", "--device", "cpu")


def test_paused_times_survive_the_disk_and_are_not_written_where_there_are_none(tmp_path: Path) -> None:
    path = tmp_path / "norm.json"
    timed = replace(WON, paused={"triton": 30.0, "liger": 33.0}, ratio_own_paused=1.1)
    Results("norm", GPU_MACHINE, rows=[timed, LOST]).save(path)
    assert load(path).rows == [timed, LOST]
    written = json.loads(path.read_text())
    first, second = (dict(zip(written["columns"], row, strict=False)) for row in written["rows"])
    assert first["ratio_own_paused"] == 1.1
    assert "paused" not in second and "ratio_own_paused" not in second


def old_form(results: Results, schema: int) -> str:
    """The file as it was before schema 4: an object a row, and a note a case."""
    rows, notes = ([asdict(each) for each in many] for many in (results.rows, results.left_out))
    if schema == 1:
        rows = [{name: row[name] for name in row if "paused" not in name} for row in rows]
    head = {"kind": "bench", "schema": schema, "suite": results.suite, "machine": results.machine}
    return json.dumps({**head, "failures": [], "left_out": notes, "rows": rows})


@pytest.mark.parametrize("schema", [1, 2, 3])
def test_a_file_of_an_older_schema_is_read(schema: int, tmp_path: Path) -> None:
    path = tmp_path / "norm.json"
    note = Note(WON.op, WON.case, WON.dtype, WON.direction, "quack", "left out")
    path.write_text(old_form(Results("norm", GPU_MACHINE, rows=[WON], left_out=[note]), schema))
    found = load(path)
    assert found.rows == [WON]
    assert found.left_out == [note]
    assert (found.rows[0].paused, found.rows[0].ratio_own_paused) == ({}, None)


def test_paused_times_that_hold_the_hosts_waking_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "gemm.json"
    timed = replace(WON, paused={"triton": 300.0, "liger": 180.0}, ratio_own_paused=0.6)
    path.write_text(old_form(Results("gemm", GPU_MACHINE, rows=[timed]), 2))
    assert load(path).rows == [WON]
    path.write_text(old_form(Results("gemm", GPU_MACHINE, rows=[timed]), 3))
    assert load(path).rows == [timed]


def test_committed_results_are_read() -> None:
    files = list(Path(__file__).parents[2].glob("benchmarks/results/*/norm.json"))
    assert files
    assert all(load(path).rows for path in files)


def test_a_second_run_adds_its_rows_and_replaces_what_it_measured_again() -> None:
    failed = Note(LOST.op, LOST.case, LOST.dtype, LOST.direction, "cuda", "wrong before timing")
    kept = Note(WON.op, WON.case, WON.dtype, WON.direction, "quack", "left out")
    old = Results("norm", GPU_MACHINE, rows=[WON, replace(LOST, floor_us=1.0)], failures=[failed], left_out=[kept])
    new = Results("norm", {**GPU_MACHINE, "date": "later"}, rows=[LOST, replace(LOST, case="other")])
    made = appended(old, new)
    assert made.rows == [WON, LOST, replace(LOST, case="other")]
    assert made.failures == []
    assert made.left_out == [kept]
    assert made.machine["date"] == "later"
    assert appended(new, old).failures == [failed]


@pytest.mark.parametrize("name", ["device", "driver", "torch", "triton", "cuda"])
def test_rows_of_another_machine_are_refused(name: str, tmp_path: Path) -> None:
    old = Results("norm", GPU_MACHINE)
    check_same_machine(old, {**GPU_MACHINE, "date": "later", "clocks": {}}, tmp_path)
    with pytest.raises(InputError, match=f"another machine.*{name} .*'other'"):
        check_same_machine(old, {**GPU_MACHINE, name: "other"}, tmp_path)


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_appends(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[dict[str, Any]] = []

    def run(suite: str, *args: Any, **options: Any) -> Results:
        measured.append(options)
        row = replace(WON, case=f"run {len(measured)}")
        return Results(suite, describe("cpu").to_dict(), rows=[row])

    monkeypatch.setattr("tilewright.bench.suite.run", run)
    for _ in range(2):
        done = CliRunner().invoke(app, [*TINY, "--rows", "cus*, other", "--append", "--json", "norm.json"])
        assert done.exit_code == 0, done.output
    assert measured[0]["rows"] == ["cus*", "other"]
    assert [row.case for row in load(there / "norm.json").rows] == ["run 1", "run 2"]


def test_the_command_resumes(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def run(suite: str, *args: Any, **options: Any) -> Results:
        asked.append(options)
        row = replace(WON, case=f"run {len(asked)}")
        return Results(suite, describe("cpu").to_dict(), rows=[row], unbegun=2 - len(asked))

    monkeypatch.setattr("tilewright.bench.suite.run", run)
    first, second = (
        CliRunner().invoke(app, [*TINY, "--budget", "1.5m", "--resume", "--json", "norm.json"]) for _ in range(2)
    )
    assert first.exit_code == second.exit_code == 0, first.output + second.output
    assert "1 cases not measured" in first.output and "not measured" not in second.output
    assert [options["budget"] for options in asked] == [90.0, 90.0]
    assert [set(options["without"]) for options in asked] == [set(), {replace(WON, case="run 1").key}]
    assert [row.case for row in load(there / "norm.json").rows] == ["run 1", "run 2"]


def test_the_command_refuses_before_it_measures(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.bench.suite.run", lambda *args, **options: pytest.fail("measured"))
    alone = CliRunner().invoke(app, [*TINY, "--append"])
    assert alone.exit_code != 0 and "--json" in alone.output
    Results("norm", GPU_MACHINE).save(there / "norm.json")
    other = CliRunner().invoke(app, [*TINY, "--append", "--json", "norm.json"])
    assert other.exit_code != 0 and "another machine" in other.output + str(other.exception)


def test_rows_are_chosen_by_name() -> None:
    import torch

    gpu = torch.device("cuda")
    chosen = select("norm", ops=["rms_norm"], rows=["decode_?", "llama70b*"], device=gpu)
    names = {item.workload.name for item in chosen}
    assert names == {"llama70b_train", *(f"decode_{m}" for m in (1, 2, 4, 8))}
    with pytest.raises(UsageError, match=r"no row of suite 'norm' is called nobody\. Rows: .*decode_1"):
        select("norm", rows=["nobody"], device=gpu)


def test_the_file_holds_every_row_before_the_run_ends(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(suite: str, *args: Any, keep: Callable[[Results], None], **options: Any) -> Results:
        found = Results(suite, describe("cpu").to_dict(), rows=[replace(WON, case="second run")])
        keep(found)
        raise SystemExit("killed")

    Results("norm", describe("cpu").to_dict(), rows=[replace(WON, case="first run")]).save(there / "norm.json")
    monkeypatch.setattr("tilewright.bench.suite.run", run)
    assert CliRunner().invoke(app, [*TINY, "--append", "--json", "norm.json"]).exit_code == 1
    assert [row.case for row in load(there / "norm.json").rows] == ["first run", "second run"]
    assert [path.name for path in there.iterdir()] == ["norm.json"], "no draft is left"
