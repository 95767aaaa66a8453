"""Which implementation runs: wishes, refusals, fallbacks, numerics and measured tables."""

import json
import logging
from pathlib import Path

import pytest
import torch
from tests.harness.registry import own_registry

import tilewright.ops  # noqa: F401 - binds every contract
from tilewright import settings
from tilewright.dispatch import contract, get_current_backend, numerics, register_impl, set_backend, use_backend
from tilewright.dispatch.preference import resolve
from tilewright.dispatch.tables import table
from tilewright.errors import BackendError, InputError, RefusedError, TableError
from tilewright.hardware import device_info

X = torch.randn(4, 8)
WIDE = torch.randn(4, 200)


def test_auto_takes_the_first_of_the_static_order_that_can_run(double, fast_backend):
    plan = double.plan((X,), "auto", "default")
    assert plan.backend == "cpu" and "unmeasured" in plan.why
    assert double.plan((WIDE,), "auto", "default").backend == "torch"


def test_an_op_may_say_where_torch_is_the_better_guess(double, fast_backend, monkeypatch):
    monkeypatch.setattr(double, "torch_first", lambda bucket, dtype, first: bucket[-1] == 8)
    plan = double.plan((X,), "auto", "default")
    assert plan.backend == "torch" and "unmeasured here; torch's kernel is the better guess" in plan.why
    assert double.plan((X[:, :4],), "auto", "default").backend == "cpu"
    assert double.plan((X,), "auto", "deterministic").backend == "cpu", "torch promises nothing there"
    assert double.plan((X,), "cpu", "default").backend == "cpu"
    monkeypatch.setattr(double, "torch_first", lambda bucket, dtype, first: first != "cpu")
    double.forget_plans()
    assert double.plan((X,), "auto", "default").backend == "cpu", "the guess may depend on who would run"


def test_strict_runs_or_says_why_not_and_what_would(double, fast_backend):
    assert double.plan((X,), "cpu!", "default").backend == "cpu"
    with pytest.raises(BackendError, match=r"test_double\[cpu\] needs N <= 100, got N=200.*Supported here: torch"):
        double.plan((WIDE,), "cpu!", "default")
    with pytest.raises(BackendError, match="runs on cuda tensors, got cpu"):
        double.plan((X,), "triton!", "default")


def test_a_missed_preference_falls_back_with_one_log_line(double, fast_backend, caplog):
    with caplog.at_level(logging.WARNING, "tilewright"):
        assert double.plan((WIDE,), "cpu", "default").backend == "torch"
        double.forget_plans()
        assert double.plan((WIDE,), "cpu", "default").backend == "torch"
    assert [r.message for r in caplog.records if "falling back" in r.message] == [caplog.records[0].message]


@pytest.mark.parametrize("variable", ["TILEWRIGHT_DISABLE_FALLBACK", "DISABLE_FALLBACK"])
def test_disable_fallback_makes_a_missed_preference_an_error(double, fast_backend, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    settings.reload()
    with pytest.raises(BackendError, match="needs N <= 100"):
        double.plan((WIDE,), "cpu", "default")
    assert double.plan((WIDE,), "auto", "default").backend == "torch", "auto choosing torch is no fallback"


def test_who_wins_among_wishes(monkeypatch):
    assert get_current_backend() == "auto"
    monkeypatch.setenv("TILEWRIGHT_BACKEND", "torch")
    settings.reload()
    assert get_current_backend() == "torch"
    set_backend("triton")
    assert get_current_backend() == "triton"
    with use_backend("cpu"):
        assert get_current_backend() == "cpu"
        assert resolve(None) == ("cpu", "default")
        assert resolve("torch") == ("torch!", "default"), "backend= in a call is strict"
        assert resolve("auto") == ("auto", "default")
    assert get_current_backend() == "triton"
    with pytest.raises(BackendError, match="no backend named 'tritn'. Allowed: auto, cuda"):
        set_backend("tritn")


def test_numerics_rules_out_what_does_not_promise_it(double, fast_backend):
    with numerics("batch_invariant"):
        assert double.plan((X,), *resolve(None)).backend == "torch"
    assert double.plan((X,), "auto", "deterministic").backend == "cpu"
    with pytest.raises(BackendError, match="is not batch invariant"):
        double.plan((X,), "cpu!", "batch_invariant")
    with pytest.raises(InputError, match="allowed are default, deterministic"), numerics("exact"):
        pass


def test_batch_invariance_takes_the_batch_out_of_the_key(double):
    assert (
        double.plan((X,), "auto", "batch_invariant").bucket == double.plan((X[:1],), "auto", "batch_invariant").bucket
    )
    assert double.plan((X,), "auto", "default").bucket != double.plan((X[:1],), "auto", "default").bucket


def test_plans_are_cached_until_something_registers(double, fast_backend):
    first = double.plan((X,), "auto", "default")
    assert double.plan((X,), "auto", "default") is first
    from tilewright.dispatch import register_impl, unregister_impl

    register_impl("another_op", backend="cpu")(lambda outs, x, config: None)
    try:
        assert double.plan((X,), "auto", "default") is not first
    finally:
        unregister_impl("another_op", backend="cpu")


def write(path: Path, **changes: object) -> Path:
    cpu = device_info("cpu")
    row = {
        "op": "test_double", "direction": "fwd", "bucket": "M=4,N=8", "dtype": "float32", "numerics": "default",
        "backend": "torch", "config": None, "us": 1.5, "noise": 0.01, "torch_us": 1.5,
    }  # fmt: skip
    header = {
        "schema": 1,
        "gpu": cpu.name,
        "arch": cpu.arch,
        "sm_count": cpu.sm_count,
        "versions": {},
        "date": "2026-11-20",
    }
    for name, value in changes.items():
        (header if name in header else row)[name] = value
    path.write_text(json.dumps({**header, "rows": [row]}))
    return path


def use_table(monkeypatch, path: Path) -> None:
    monkeypatch.setenv("TILEWRIGHT_TUNING_TABLE", str(path))
    settings.reload()
    table.forget()


def test_a_measured_row_decides_and_is_cited(double, fast_backend, monkeypatch, tmp_path):
    use_table(monkeypatch, write(tmp_path / "t.json"))
    plan = double.plan((X,), "auto", "default")
    assert plan.backend == "torch" and "measured fastest: 1.5 us" in plan.why and plan.row.source == "t.json"
    assert double.plan((X[:2],), "auto", "default").backend == "cpu", "another bucket is not covered by the row"
    assert double.plan((X,), "cpu!", "default").backend == "cpu", "a strict wish outranks the table"


def test_a_row_brings_its_config(double, fast_backend, monkeypatch, tmp_path):
    use_table(monkeypatch, write(tmp_path / "t.json", backend="cpu", config={"block": 77}))
    double(X, "auto", "default")
    assert fast_backend.configs == [{"block": 77}]


def test_a_row_of_another_architecture_is_ignored(double, fast_backend, monkeypatch, tmp_path):
    use_table(monkeypatch, write(tmp_path / "t.json", arch="sm_90"))
    assert double.plan((X,), "auto", "default").backend == "cpu"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"schema": 99}, "schema 99, this version reads 2"),
        ({"extra": 1}, "row 0 has fields"),
    ],
)
def test_the_named_table_raises_where_it_must_not_be_used(double, fast_backend, monkeypatch, tmp_path, change, match):
    use_table(monkeypatch, write(tmp_path / "t.json", **change))
    with pytest.raises(TableError, match=match):
        double.plan((X,), "auto", "default")


def test_the_nearest_gpu_of_the_architecture_is_used_and_said(double, fast_backend, monkeypatch, tmp_path, caplog):
    use_table(monkeypatch, write(tmp_path / "t.json", gpu="Another CPU", sm_count=1))
    with caplog.at_level(logging.INFO, "tilewright"):
        assert double.plan((X,), "auto", "default").backend == "torch"
    assert any("using the one of Another CPU" in r.message for r in caplog.records)
    assert any("test_double M=4,N=8 float32: torch" in r.message for r in caplog.records), "the chosen row is logged"


def test_a_kernel_without_a_configuration_for_the_sizes_is_refused():
    """Alone in its backend too; a measured row may name a candidate where nothing is the default."""
    args = (torch.randn(4, 16), torch.randn(16), 1e-6, 0.0, False)
    raw = contract("rms_norm").forward
    with own_registry():
        register_impl("rms_norm", backend="cpu", configure=lambda bucket, dtype: None)(lambda *args, config: None)
        raw.forget_plans()
        assert raw.plan(args, "auto", "default").backend == "torch"
        with pytest.raises(RefusedError, match="has no configuration for these sizes"):
            raw.plan(args, "cpu!", "default")
    raw.forget_plans()


def test_a_kernel_that_leaves_the_sizes_to_others_is_not_the_guess_and_can_be_asked_for():
    """Its candidates are the tuner's: without a row `auto` goes on, and a call that names it gets the first."""
    args = (torch.randn(4, 16), torch.randn(16), 1e-6, 0.0, False)
    raw = contract("rms_norm").forward
    with own_registry():
        register_impl(
            "rms_norm", backend="cpu", configure=lambda bucket, dtype: None, candidates=lambda bucket, dtype: (3, 5)
        )(lambda *args, config: None)
        raw.forget_plans()
        assert raw.plan(args, "auto", "default").backend == "torch"
        assert raw.plan(args, "cpu!", "default").config == 3
    raw.forget_plans()
