"""Rows that were measured with other versions: they are used, named by `explain`, and counted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright import settings
from tilewright.dispatch import explain
from tilewright.dispatch.tables import extra, staleness, table
from tilewright.dispatch.tables.update import update
from tilewright.errors import TableError
from tilewright.hardware import device_info
from tilewright.version import __version__

CPU = device_info("cpu")
X, WEIGHT = torch.ones(4, 8), torch.ones(8)
NOW = {"torch": torch.__version__, "tilewright": __version__}


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    """The user's folder of tables."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    settings.reload()
    table.forget()
    yield tmp_path / "tables"
    monkeypatch.undo()
    settings.reload()
    table.forget()


def header(**versions: str | None) -> dict[str, Any]:
    return {"gpu": CPU.name, "arch": "cpu", "sm_count": CPU.sm_count, "versions": versions, "date": "2026-11-20"}


def row(n: int = 8, us: float = 1.5) -> dict[str, Any]:
    return {
        "op": "rms_norm", "direction": "fwd", "bucket": f"M=4,N={n},plain=1", "dtype": "float32", "numerics": "default",
        "backend": "torch", "config": None, "us": us, "noise": 0.01, "torch_us": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        (NOW, ""),
        ({**NOW, "torch": "1.0"}, f"torch 1.0 (now {torch.__version__})"),
        ({**NOW, "tilewright": "0.0.1"}, f"tilewright 0.0.1 (now {__version__})"),
        ({**NOW, "driver": "580.1"}, "driver 580.1 (now none)"),
        ({**NOW, "a compiler that is gone": "1"}, ""),
    ],
)
def test_a_stale_row_is_used_and_explain_says_so(folder, versions, text):
    update(folder / "mine", header(**versions), [row()])
    found = explain("rms_norm", X, WEIGHT)
    assert (found.backend, found.stale) == ("torch", text)
    assert "measured fastest: 1.5 us" in found.why
    assert ("the row is stale, measured with" in str(found)) is bool(text)


def test_a_shipped_row_is_not_called_stale(folder, monkeypatch, tmp_path):
    shipped = tmp_path / "package"
    monkeypatch.setattr(table, "folders", lambda: [shipped, folder])
    update(shipped / "mine", header(torch="1.0"), [row()])
    found = explain("rms_norm", X, WEIGHT)
    assert "measured fastest: 1.5 us" in found.why
    assert found.stale == ""
    assert staleness.users_tables(["cpu"]) == []


def test_a_row_measured_again_is_fresh_and_its_neighbour_is_not(folder):
    update(folder / "mine", header(torch="1.0"), [row(), row(16)])
    update(folder / "mine", header(**NOW), [row(us=1.0)])
    (state,) = staleness.users_tables(["cpu"])
    assert (state.rows, state.stale, state.changes) == (2, 1, {"torch": ("1.0", torch.__version__)})
    assert explain("rms_norm", X, WEIGHT).stale == ""


def test_what_is_no_table_is_not_counted(folder, caplog):
    (folder / "mine").mkdir(parents=True)
    (folder / "mine" / "rms_norm.json").write_text("my notes")
    assert staleness.users_tables(["cpu"]) == []


def test_a_table_that_is_held_outranks_the_users_own_until_it_is_released(folder, tmp_path):
    update(folder / "mine", header(**NOW), [row()])
    update(tmp_path / "model.json", header(**NOW), [row(us=1.0)])

    def us() -> float:
        return table.lookup("rms_norm", "fwd", "M=4,N=8,plain=1", "float32", "default", CPU).us

    assert us() == 1.5
    for holds in (1, 2):
        extra.hold(tmp_path / "model.json")
        assert len(extra.in_force()) == 1, holds
    assert us() == 1.0
    extra.release(tmp_path / "model.json")
    assert us() == 1.0, "one holds it yet"
    extra.release(tmp_path / "model.json")
    assert us() == 1.5


def test_versions_of_a_row_are_an_object(folder):
    folder.mkdir(parents=True)
    whole = {"schema": 1, **header(**NOW), "rows": [{**row(), "versions": "torch 1"}]}
    (folder / "t.json").write_text(json.dumps(whole))
    with pytest.raises(TableError, match="versions = 'torch 1'"):
        table.read(folder / "t.json")
