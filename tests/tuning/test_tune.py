"""The tuner on an op whose candidates have every vice: it finds the best, and survives all others."""

import json
import math
import re
import threading
import time
from typing import Any

import pytest
import torch
from filelock import FileLock, Timeout
from tests.harness.simulated_time import READING_NS

from tilewright.bench.tables import slug
from tilewright.dispatch import explain
from tilewright.dispatch.tables import locks, table
from tilewright.dispatch.tables.update import update
from tilewright.errors import BackendError, InputError, TableError, UsageError
from tilewright.hardware import device_info
from tilewright.tuning import tune
from tilewright.tuning.exclusive import exclusive
from tilewright.tuning.problem import Problem
from tilewright.tuning.watched import Watched

X = torch.randn(64, 4096)


@pytest.fixture
def quick(fake_op):
    """`tune` on the fake op, backward: two candidates, both right."""

    def run(**options):
        return tune(fake_op.NAME, direction="bwd", device="cpu", **options)

    return run


@pytest.fixture
def patience(fake_op):
    """Seconds after which a step hangs: what a worker's start and first steps take together, here and now, which is
    more than any step that does not.

    A number would be wrong on a machine that does other work as well.
    """
    began, worker = time.monotonic(), Watched()
    modules = ("tilewright.ops", fake_op.__name__)
    try:
        worker.ask(
            "prepare", Problem(fake_op.NAME, "fwd", {"M": 64, "N": 4096}, X.dtype, "cpu", 0, modules), timeout=99
        )
        assert worker.ask("check", "cpu", fake_op.FAST, timeout=99) is None
    finally:
        worker.close()
    return max(3, math.ceil(time.monotonic() - began))


def test_the_best_wins_and_every_loser_has_its_reason(fake_op, patience):
    assert fake_op.FORWARD.plan((X,), "auto", "default").config == fake_op.DEFAULT
    report = tune(fake_op.NAME, direction="fwd", backend="cpu", device="cpu", seconds=patience)
    (tuned,) = report.tuned
    assert tuned.after.config == fake_op.FAST
    assert tuned.changed
    assert tuned.gain is not None, [(str(t), t.reason) for t in tuned.trials]
    slow, fast = (config.passes * fake_op.PASS_S + READING_NS / 1e9 for config in (fake_op.DEFAULT, fake_op.FAST))
    assert tuned.gain == pytest.approx(slow / fast - 1)
    reasons = {trial.config: trial.reason for trial in tuned.trials}
    expected = {
        fake_op.DEFAULT: None,
        fake_op.FAST: None,
        fake_op.Config("right", 250): None,
        fake_op.Config("wrong"): "wrong (eager): y: error 0.5",
        fake_op.Config("partial"): "wrong (",  # eager, unless the memory it was given held the result already
        fake_op.Config("outside"): "wrong: wrote outside its outputs",
        fake_op.Config("writes_input"): "wrong (inputs_unchanged): input 0",
        fake_op.Config("hangs"): f"hung: no answer in {patience} s",
        fake_op.Config("crashes"): "crashed: SIGSEGV",
        fake_op.Config("raises"): "ValueError: no such tile",
        fake_op.Config("spills"): "spills: double_kernel, 24",
        fake_op.Config("compiler_hangs"): f"hung: no answer in {patience} s (while it was compiled)",
    }
    assert set(reasons) == set(expected)
    for config, reason in expected.items():
        assert reasons[config] == reason if reason is None else reasons[config].startswith(reason), config

    _, (row,) = table.read(table.file_of(report.table, fake_op.NAME))
    assert (row.backend, row.config) == ("cpu", {"kind": "right", "passes": 1})
    assert row.us == pytest.approx(tuned.after.us, rel=1e-3)
    assert row.torch_us > 0
    plan = fake_op.FORWARD.plan((X,), "auto", "default")
    assert plan.config == fake_op.FAST, "a running process follows the table it has written"
    assert row.source in explain(fake_op.NAME, X).why
    assert torch.equal(fake_op.double(X), 2 * X)
    assert json.loads(json.dumps(report.to_dict()))["tuned"][0]["row"]["op"] == fake_op.NAME
    assert "dropped 2: hung" in str(report)


@pytest.mark.exhaustive
def test_a_row_changes_only_for_a_gain_worth_it(fake_op, quick, at_home):
    report = quick(min_gain=1e6)
    (first,) = report.tuned
    assert not first.changed
    assert first.after.config == fake_op.DEFAULT
    assert "gains less than" in first.note
    _, (row,) = table.read(table.file_of(report.table, fake_op.NAME))
    assert row.config == {"kind": "right", "passes": 50}, "measured now, so it is written down"

    (second,) = quick().tuned
    assert second.changed
    assert second.after.config == fake_op.FAST
    before = table.file_of(report.table, fake_op.NAME).read_bytes()
    (third,) = quick().tuned
    assert third.before.config == fake_op.FAST
    assert not third.changed
    assert table.file_of(report.table, fake_op.NAME).read_bytes() == before


def test_a_budget_ends_the_search_but_not_the_measuring(fake_op, quick, at_home):
    (tuned,) = quick(budget=0.01).tuned
    assert [trial.reason for trial in tuned.trials] == [None, "not tried: the budget was used up"]
    assert tuned.after.config == fake_op.DEFAULT
    assert tuned.after.us > 0


def test_one_tunes_and_the_others_wait_and_use_it(fake_op, quick, at_home, cache_folder, monkeypatch):
    name = device_info("cpu").name
    (tuned,) = quick().tuned
    (cache_folder / "tables").rename(cache_folder / "kept")
    table.forget()
    busy, refused = threading.Event(), threading.Event()

    class Seen(FileLock):
        """Says when a lock was not to be had: only then does the other process go on, however slow the machine is."""

        def acquire(self, *args: Any, **options: Any) -> Any:
            try:
                return super().acquire(*args, **options)
            except Timeout:
                refused.set()
                raise

    def other_process() -> None:
        with FileLock(cache_folder / "locks" / f"tune-{slug(f'{name} {fake_op.NAME}')}.lock"):
            busy.set()
            refused.wait()
            old, _ = table.read(next((cache_folder / "kept").glob("*/*.json")))
            header = {field: old[field] for field in ("gpu", "arch", "sm_count", "versions", "date")}
            update(cache_folder / "tables" / slug(name), header, [tuned.row])

    monkeypatch.setattr(locks, "FileLock", Seen)
    thread = threading.Thread(target=other_process, daemon=True)
    thread.start()
    busy.wait()
    report = quick()
    assert refused.is_set()
    thread.join()
    assert report.tuned == []
    assert [each.reason for each in report.untuned] == ["another process has just tuned it"]
    assert fake_op.BACKWARD.plan((X,), "auto", "default").config == fake_op.FAST


def test_without_a_folder_for_locks_each_says_what_it_cannot_do(cache_folder, tmp_path):
    cache_folder.write_text("a file")
    folder = re.escape(str(cache_folder / "locks"))
    with pytest.raises(InputError, match=f"^tune: {folder} cannot be made: Not a dir.*Set TILEWRIGHT_CACHE_DIR"):
        exclusive("an op").__enter__()
    path = tmp_path / "table.json"
    with pytest.raises(TableError, match=f"^{re.escape(str(path))} cannot be locked: {folder}: Not a directory"):
        update(path, {}, [])
    assert not path.exists()


def test_never_inside_a_graph_capture(fake_op, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(InputError, match="a CUDA graph is being captured"):
        tune(fake_op.NAME, device="cpu")


def test_nothing_but_torch_is_nothing_to_tune(cache_folder):
    report = tune("layer_norm", device="cpu", direction="bwd", dtype="bf16", case={"M": 8, "N": 64})
    assert report.ok
    assert [each.reason for each in report.untuned] == ["torch alone can run it"]


def test_wishes_that_cannot_be_met_are_refused_before_the_work(fake_op, cache_folder, tmp_path):
    with pytest.raises(UsageError, match=r"no op or suite named 'nope'. Ops: .*rms_norm"):
        tune("nope", device="cpu")
    with pytest.raises(BackendError, match="backend triton runs on cuda tensors, got cpu"):
        tune(fake_op.NAME, device="cpu", backend="triton")
    (tmp_path / "notes.json").write_text("{}")
    with pytest.raises(ValueError, match="schema None"):
        tune(fake_op.NAME, device="cpu", path=tmp_path / "notes.json")


@pytest.mark.gpu
def test_a_fault_of_the_gpu_costs_a_worker_and_not_the_context_of_the_caller(fake_op):
    report = tune(fake_op.NAME, direction="fwd", backend="triton", device="cuda", seconds=30.0)
    (tuned,) = report.tuned
    assert tuned.after.config == fake_op.FAST
    (faulty,) = [trial for trial in tuned.trials if trial.config.kind == "faults"]
    assert faulty.us is None
    assert "CUDA error" in faulty.reason
    x = X.cuda()
    assert torch.equal(fake_op.double(x), 2 * x)
    assert fake_op.FORWARD.plan((x,), "auto", "default").config == fake_op.FAST
