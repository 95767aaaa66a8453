"""Tables: what is refused and why, what a row may say, and how rows are written."""

import json
import logging
import re
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tilewright import settings
from tilewright.dispatch import explain, register_impl, unregister_impl
from tilewright.dispatch.tables import columns, table
from tilewright.dispatch.tables.update import update
from tilewright.errors import TableError
from tilewright.hardware import device_info

X = torch.randn(4, 8)
CPU = device_info("cpu")
HEADER = {"gpu": CPU.name, "arch": CPU.arch, "sm_count": CPU.sm_count, "versions": {"torch": "1"}, "date": "2026-11-20"}

OP_ALONE = {"common": {}, "columns": ["op"]}


class Config(NamedTuple):
    block: int
    packed: bool = False
    tile: tuple[int, ...] = (1, 1)


@pytest.fixture
def spacious(double):
    """A backend "cpu" of `test_double` with a search space: 4, 8 and 16, and 4 where nothing is measured."""
    seen = []

    @register_impl(
        "test_double",
        backend="cpu",
        configure=lambda bucket, dtype: Config(4),
        config_type=Config,
        candidates=lambda bucket, dtype: (Config(8), Config(16, tile=(2, 2))),
    )
    def launch(outs, x, *, config):
        seen.append(config)
        torch.mul(x, 2, out=outs[0])

    yield seen
    unregister_impl("test_double", backend="cpu")


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    """The user's folder of tables."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    settings.reload()
    table.forget()
    return tmp_path / "tables"


def row(**changes: Any) -> dict[str, Any]:
    return {
        "op": "test_double", "direction": "fwd", "bucket": "M=4,N=8", "dtype": "float32", "numerics": "default",
        "backend": "cpu", "config": {"block": 8}, "us": 1.5, "noise": 0.01, "torch_us": None, **changes,
    }  # fmt: skip


def write(path: Path, *rows: dict[str, Any], **header: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(columns.text({"schema": table.SCHEMA, **HEADER, **header}, rows, table.COLUMNS))
    table.forget()
    return path


def warnings(caplog) -> str:
    return "\n".join(r.message for r in caplog.records if r.levelno >= logging.WARNING)


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        ('{"schema": 1, "ro', "not JSON"),
        ('[{"schema": 1}]', "holds a list, not a table"),
        ('{"schema": 0, "rows": []}', "schema 0, this version reads 2. Measure it again: tilewright tune"),
        (json.dumps({"schema": 2, **HEADER, "rows": []}), "the table has fields"),
        (
            json.dumps({"schema": 2, **HEADER, **OP_ALONE, "rows": [["softmax", 1]]}),
            "row 0 is no list of at most 1",
        ),
        (
            json.dumps({"schema": 2, **HEADER, **OP_ALONE, "rows": [["softmax"]]}),
            "row 0 has fields ['op'], expected",
        ),
        (json.dumps({"schema": 1, "rows": []}), "the table has fields"),
        (json.dumps({"schema": 1, **HEADER, "rows": [{**row(), "us": "fast"}]}), "row 0 has us = 'fast', a str"),
        (json.dumps({"schema": 1, **HEADER, "rows": [{**row(), "runner_up": {}}]}), "runner_up of row 0 has fields"),
    ],
)
def test_an_unusable_file_in_the_users_folder_is_left_out_and_said(double, spacious, folder, caplog, contents, reason):
    write(folder / "b.json", row())
    (folder / "a.json").write_text(contents)
    assert double.plan((X,), "auto", "default").config == Config(8), "the other table still counts"
    assert warnings(caplog).startswith("this tuning table is not used: ")
    assert reason in warnings(caplog)


def test_a_table_of_another_architecture_is_said_loudly_only_where_it_was_named(
    double, spacious, folder, monkeypatch, caplog
):
    elsewhere = write(folder / "a.json", row(), arch="sm_90", gpu="NVIDIA H200")
    with caplog.at_level(logging.INFO, "tilewright"):
        assert double.plan((X,), "auto", "default").config == Config(4)
    assert "was measured on NVIDIA H200 (sm_90) and is not used on" in caplog.text
    assert warnings(caplog) == ""
    named = elsewhere.rename(folder.parent / "named.json")
    monkeypatch.setenv("TILEWRIGHT_TUNING_TABLE", str(named))
    settings.reload()
    table.forget()
    double.forget_plans()
    assert double.plan((X,), "auto", "default").config == Config(4)
    assert "named.json was measured on NVIDIA H200 (sm_90)" in warnings(caplog)


def test_the_variable_may_name_a_folder_of_files(double, spacious, folder, monkeypatch):
    named = folder.parent / "measured"
    named.mkdir()
    write(named / "test_double.json", row())
    write(named / "another_op.json", row())
    monkeypatch.setenv("TILEWRIGHT_TUNING_TABLE", str(named))
    settings.reload()
    table.forget()
    double.forget_plans()
    assert double.plan((X,), "auto", "default").config == Config(8)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"blok": 8}, "does not fit: .*unexpected keyword argument 'blok'"),
        ({}, "does not fit: .*missing 1 required positional argument"),
        ({"block": "8"}, "block is '8', a str; it has to be int"),
        ({"block": True}, "block is True, a bool; it has to be int"),
        ({"block": 8, "packed": 1}, "packed is 1, a int; it has to be bool"),
        ({"block": 12}, r"is outside the search space, 3 configurations for Bucket\(M=4, N=8\)"),
    ],
)
def test_a_config_that_is_not_ours_is_refused_and_the_default_runs(double, spacious, folder, caplog, config, reason):
    write(folder / "t.json", row(config=config))
    assert torch.equal(double(X, "auto", "default"), 2 * X)
    assert spacious == [Config(4)]
    plan = double.plan((X,), "auto", "default")
    assert plan.row is None
    assert "the measured choice is refused: t.json: cpu config" in plan.why
    assert re.search(reason, warnings(caplog))


def test_lists_of_json_are_the_tuples_of_a_config(double, spacious, folder):
    write(folder / "t.json", row(config={"block": 16, "tile": [2, 2]}))
    assert double.plan((X,), "auto", "default").config == Config(16, tile=(2, 2))


def test_the_runner_up_runs_where_the_winner_cannot(double, spacious, folder):
    second = {"backend": "cpu", "config": {"block": 16, "tile": [2, 2]}, "us": 2.5}
    write(folder / "t.json", row(backend="cuda", config=None, runner_up=second))
    plan = double.plan((X,), "auto", "default")
    assert (plan.backend, plan.config) == ("cpu", Config(16, tile=(2, 2)))
    assert "measured next to cuda, which cannot run here: 2.5 us" in plan.why


def test_a_wish_gets_the_config_measured_for_it(double, spacious, folder):
    second = {"backend": "cpu", "config": {"block": 8}, "us": 2.5}
    write(folder / "t.json", row(backend="torch", config=None, runner_up=second))
    assert double.plan((X,), "auto", "default").launch is None
    assert "torch" not in double.plan((X,), "cpu!", "default").why
    assert double.plan((X,), "cpu!", "default").config == Config(8)


def test_the_row_is_cited_with_what_it_won_against(folder):
    import tilewright.ops  # noqa: F401 - binds every contract

    second = {"backend": "torch", "config": None, "us": 9.0}
    measured = row(
        op="rms_norm", bucket="M=4,N=8,plain=1", dtype="bfloat16", backend="torch", config=None,
        runner_up={**second, "backend": "cpu"},
    )  # fmt: skip
    write(folder / "t.json", measured)
    why = explain("rms_norm", torch.ones(4, 8).bfloat16(), torch.ones(8).bfloat16()).why
    assert why == f"measured fastest: 1.5 us on {CPU.name}, 2026-11-20 (t.json), cpu 9 us"


def test_a_table_with_an_object_a_row_is_read_and_written_anew(folder, tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"schema": 1, **HEADER, "rows": [row(), row(bucket="M=8,N=8", runner_up=None)]}))
    before = table.read(path)[1]
    assert [each.bucket for each in before] == ["M=4,N=8", "M=8,N=8"]
    update(path, HEADER, [])
    assert json.loads(path.read_text())["schema"] == table.SCHEMA
    assert table.read(path)[1] == before


def test_rows_are_merged_and_remember_their_day(folder, tmp_path):
    path = tmp_path / "mine.json"
    update(path, HEADER, [row(), row(bucket="M=8,N=8")])
    update(path, {**HEADER, "date": "2026-11-21"}, [row(us=1.0)])
    header, rows = table.read(path)
    assert header["date"] == "2026-11-21"
    assert [(r.bucket, r.us, r.date) for r in rows] == [("M=4,N=8", 1.0, "2026-11-21"), ("M=8,N=8", 1.5, "2026-11-20")]
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".json" or p.name.startswith(".")] == ["mine.json"]


@pytest.mark.parametrize(
    ("header", "kept"),
    [({"versions": {"torch": "2"}}, 2), ({"gpu": "another"}, 1), ({"versions": {"torch": "1", "tileiras": "13"}}, 2)],
)
def test_rows_of_another_gpu_do_not_stay(folder, tmp_path, header, kept):
    path = tmp_path / "mine.json"
    update(path, HEADER, [row()])
    update(path, {**HEADER, **header}, [row(bucket="M=8,N=8")])
    assert len(table.read(path)[1]) == kept


def test_a_file_that_is_no_table_is_not_overwritten(folder, tmp_path):
    path = tmp_path / "notes.json"
    path.write_text("my notes")
    with pytest.raises(TableError, match="not JSON"):
        update(path, HEADER, [row()])
    assert path.read_text() == "my notes"


def test_writers_lose_nothing_of_each_other(folder, tmp_path):
    path = tmp_path / "mine.json"

    def add(m: int) -> None:
        update(path, HEADER, [row(bucket=f"M={m},N=8")])

    threads = [threading.Thread(target=add, args=(m,)) for m in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {r.bucket for r in table.read(path)[1]} == {f"M={m},N=8" for m in range(12)}


def test_a_running_process_follows_what_is_written(double, spacious, folder):
    double(X, "auto", "default")
    update(folder / "t.json", HEADER, [row()])
    double(X, "auto", "default")
    assert spacious == [Config(4), Config(8)]


def test_another_folder_in_the_environment_brings_other_tables(fast_backend, folder, tmp_path, monkeypatch):
    write(folder / "mine.json", row(backend="torch", config=None))
    assert table.lookup("test_double", "fwd", "M=4,N=8", "float32", "default", CPU) is not None
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "another"))
    settings.reload()
    assert table.lookup("test_double", "fwd", "M=4,N=8", "float32", "default", CPU) is None


@pytest.mark.parametrize("name", ["gpu", "made"])
def test_a_folder_gets_one_file_an_op(folder, tmp_path, name):
    (tmp_path / "made").mkdir()
    path = tmp_path / name
    update(path, HEADER, [row(), row(op="other"), row(bucket="M=8,N=8")])
    assert sorted(file.name for file in path.iterdir()) == ["other.json", "test_double.json"]
    assert [r.bucket for r in table.read(path / "test_double.json")[1]] == ["M=4,N=8", "M=8,N=8"]
    before = (path / "other.json").read_bytes()
    update(path, {**HEADER, "versions": {"torch": "2"}}, [row(us=1.0)])
    rows = table.read(path / "test_double.json")[1]
    assert [(r.us, r.versions) for r in rows] == [(1.0, {"torch": "2"}), (1.5, {"torch": "1"})]
    assert (path / "other.json").read_bytes() == before


def test_a_look_up_reads_the_file_of_its_op_alone(double, spacious, folder, caplog):
    write(folder / "gpu" / "test_double.json", row())
    (folder / "gpu" / "rms_norm.json").write_text("no table")
    assert double.plan((X,), "auto", "default").config == Config(8)
    assert warnings(caplog) == ""
    assert table.lookup("rms_norm", "fwd", "M=4,N=8,plain=1", "float32", "default", CPU) is None
    assert "rms_norm.json: not JSON" in warnings(caplog)


def test_a_folder_of_the_users_wins_over_a_file_of_the_users(double, spacious, folder):
    """What a version before wrote, one file for all ops, still counts where nothing newer was measured."""
    write(folder / "z.json", row(us=9.0), row(bucket="M=8,N=8"))
    write(folder / "gpu" / "test_double.json", row(us=1.0))
    found = [table.lookup("test_double", "fwd", f"M={m},N=8", "float32", "default", CPU) for m in (4, 8)]
    assert [each.us for each in found] == [1.0, 1.5]


def test_what_lies_in_another_ops_file_is_not_found(double, spacious, folder):
    write(folder / "gpu" / "other.json", row())
    write(folder / "gpu" / "test_double.json", row(op="other"))
    assert double.plan((X,), "auto", "default").config == Config(4)
    assert table.lookup("other", "fwd", "M=4,N=8", "float32", "default", CPU) is None
