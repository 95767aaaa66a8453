"""Threads that decide at once: no plan of before a registration is kept, nothing half imported runs, each is heard."""

import importlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tilewright.dispatch import implementations, record, register_impl, registry, unregister_impl

X = torch.randn(4, 8)


def test_a_plan_that_was_decided_before_a_registration_is_not_kept_after_it(double, fast_backend, monkeypatch):
    """One thread still decides while another one takes a backend out."""
    deciding, registered = threading.Event(), threading.Event()

    def slow(bucket, dtype, first):
        deciding.set()
        assert registered.wait(timeout=60)
        return False

    monkeypatch.setattr(double, "torch_first", slow)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(double.plan, (X,), "auto", "default")
        assert deciding.wait(timeout=60)
        register_impl("test_double", backend="peer")(lambda outs, x, config: outs[0].copy_(2 * x))
        registered.set()
        assert late.result(timeout=60).backend == "cpu"
    try:
        assert double.plan((X,), "auto", "default").backend == "peer"
    finally:
        unregister_impl("test_double", backend="peer")


def test_a_plan_is_decided_once_although_deciding_imports_kernels(double, tmp_path, monkeypatch):
    module = kernel_module(tmp_path, monkeypatch, "once", "LAST = 7\n")
    assert module not in sys.modules
    decided = []
    monkeypatch.setattr(double, "torch_first", lambda *args: decided.append(args) or False)
    for _ in range(3):
        assert double.plan((X,), "auto", "default").kernel == "cpu.double"
    assert len(decided) == 1


def test_a_module_that_is_still_imported_is_waited_for(double, tmp_path, monkeypatch):
    """Its kernel is registered before its last line has run."""
    reading = threading.Event()
    monkeypatch.setattr(sys, "tilewright_test_reading", reading, raising=False)
    slow = "import sys, time\nsys.tilewright_test_reading.set()\ntime.sleep(0.5)\nLAST = 7\n"
    kernel_module(tmp_path, monkeypatch, "slow", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(implementations, "test_double", "fwd", "cpu")
        assert reading.wait(timeout=60)
        out = torch.empty(1)
        implementations("test_double", "fwd", "cpu")["cpu"].launch((out,), X, config=None)
        assert out.item() == 7
        first.result(timeout=60)


def kernel_module(folder, monkeypatch, name, after):
    """A module that `test_double` lists as its kernel for a CPU; `after` is what stands behind the registration."""
    module = f"tilewright_tests_{name}.kernels.cpu.double"
    file = folder.joinpath(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text(
        "from tests.dispatch.conftest import DOUBLE\n"
        "from tilewright.dispatch import register_kernel\n"
        "@register_kernel(DOUBLE)\n"
        "def launch(outs, args, config):\n"
        "    outs[0].fill_(LAST)\n" + after
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(registry._listed, "test_double", {})
    for found in (registry._kernels, registry._implementations):
        monkeypatch.setitem(found, ("test_double", "fwd"), {})
    registry.list_kernels("test_double", [module])
    importlib.invalidate_caches()
    return module


def test_a_recording_inside_another_leaves_the_outer_one_listening(double):
    with record() as outer:
        with record() as inner:
            pass
        double(X, "auto", "default")
    assert (len(outer.calls), len(inner.calls)) == (1, 0)


def test_recordings_of_two_threads_end_one_by_one(double):
    begun, ended = threading.Barrier(2), threading.Event()

    def short():
        with record():
            begun.wait(timeout=60)
        ended.set()

    with ThreadPoolExecutor(1) as pool:
        with record() as mine:
            other = pool.submit(short)
            begun.wait(timeout=60)
            assert ended.wait(timeout=60)
            double(X, "auto", "default")
        other.result(timeout=60)
    assert len(mine.calls) == 1


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_first_calls_of_one_signature_from_eight_threads_agree(double, fast_backend, backend):
    double.forget_plans()
    together = threading.Barrier(8)

    def work(i):
        x = torch.full((4, 8), float(i))
        together.wait(timeout=60)
        return torch.equal(double(x, backend, "default"), 2 * x)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
