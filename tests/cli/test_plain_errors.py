"""What a newcomer gets wrong is answered in one line that names what to do."""

import pytest
import torch

from tilewright import log, warmup
from tilewright.dispatch import backends


def one_line(done) -> str:
    assert done.exit_code == 2, done.output
    *_, line = done.stderr.strip().splitlines()
    assert "Traceback" not in done.stderr
    return line


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs here")
def test_a_backend_that_cannot_run_on_a_cpu_is_not_checked(tilewright):
    line = one_line(tilewright("check", "rms_norm", "--backend", "triton", "--device", "cpu"))
    assert "backend 'triton' runs on cuda tensors, got cpu" in line


def test_a_variable_that_names_no_backend_is_named(tilewright, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_BACKEND", "foo")
    line = one_line(tilewright("explain", "rms_norm"))
    assert "TILEWRIGHT_BACKEND=foo" in line
    assert "Allowed: auto, cuda" in line


def test_a_misspelt_variable_is_said_once_a_process_tree(monkeypatch, caplog):
    log.forget_logged()
    monkeypatch.delenv(log._LOGGED, raising=False)
    monkeypatch.setenv("TILEWRIGHT_BACKENDS", "triton")
    log.configure()
    log._logged.clear()  # as a child process begins
    log.configure()
    (record,) = caplog.records
    assert "TILEWRIGHT_BACKENDS is no variable of tilewright and is ignored" in record.message
    assert "did you mean TILEWRIGHT_BACKEND?" in record.message
    log.forget_logged()


def test_bench_takes_an_op(tilewright):
    done = tilewright("bench", "rms_norm", "--case", "M=3,N=5,nope=1", "--device", "cpu")
    assert "nope" in one_line(done), "the case is wrong, the suite is not"


def test_a_warm_up_that_prepares_nothing_says_what_is_missing(tilewright, monkeypatch):
    monkeypatch.setattr(backends, "module_exists", lambda name: False)
    monkeypatch.setattr(warmup, "events", lambda wanted, arch, *_, **__: iter([warmup.PlanSummary(arch, 0, 21, 21)]))
    line = one_line(tilewright("warmup", "--suite", "rope", "--arch", "sm_80"))
    assert "torch computes every call" in line
    assert "pip install triton" in line


def test_a_warm_up_whose_calls_all_go_to_torch_passes(tilewright, monkeypatch):
    monkeypatch.setattr(warmup, "missing", lambda backend, device: None)
    monkeypatch.setattr(warmup, "events", lambda wanted, arch, *_, **__: iter([warmup.PlanSummary(arch, 0, 21, 21)]))
    assert tilewright("warmup", "--suite", "rope", "--arch", "sm_80").exit_code == 0
