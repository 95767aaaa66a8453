"""Launches through cuda-core from threads that never used the device, and on streams that no thread used before."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tilewright.errors import BackendError
from tilewright.jit import driver


class FakeCore:
    """In the place of cuda-core: an object of a device for each thread, and a context that each thread must set."""

    def __init__(self):
        self.thread, self.launched = threading.local(), []

    def Device(self, index):
        return FakeDevice(self, index)

    def LaunchConfig(self, **shape):
        return shape

    def launch(self, stream, shape, kernel, *params):
        if getattr(self.thread, "context", None) != kernel.device:
            raise RuntimeError("CUDA_ERROR_INVALID_CONTEXT: no context is current")
        self.launched.append((stream, shape["grid"], params))


class FakeDevice:
    def __init__(self, core, index):
        self.core, self.index = core, index

    def set_current(self):
        self.core.thread.context = self.index
        self.core.thread.used = {*getattr(self.core.thread, "used", ()), self.index}

    def create_stream(self, handle):
        if self.index not in getattr(self.core.thread, "used", ()):
            raise RuntimeError(f"Device {self.index} is not yet initialized, perhaps you forgot to call .set_current()")
        return self.index, handle.__cuda_stream__()[1]


@pytest.fixture
def core(monkeypatch):
    pytest.importorskip("cuda.core")
    made = FakeCore()
    monkeypatch.setattr(driver, "_core", lambda: made)
    driver._stream.cache_clear()
    yield made
    driver._stream.cache_clear()


def prepared(device=0):
    kernel = SimpleNamespace(device=device)
    return driver.Launch(driver.Loaded(kernel, "kernel", 0, device), "if", block=(128, 1, 1))


def in_a_new_thread(function, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result(timeout=60)


@pytest.mark.parametrize("device", [0, 1])
def test_a_new_thread_launches_on_a_stream_that_no_thread_used(core, device):
    core.Device(device).set_current()
    launch = prepared(device)
    in_a_new_thread(launch, 4, 1, 1, 77, None, 5, 0.5)
    assert core.launched == [((device, 77), (4, 1, 1), (5, driver._bits(0.5)))]


def test_a_new_thread_launches_on_a_stream_that_others_used(core):
    core.Device(0).set_current()
    launch = prepared()
    launch(1, 1, 1, 77, None, 5, 0.5)
    in_a_new_thread(launch, 2, 1, 1, 77, None, 5, 0.5)
    assert [grid for _, grid, _ in core.launched] == [(1, 1, 1), (2, 1, 1)]


def test_new_threads_make_the_first_launch_together(core):
    core.Device(0).set_current()
    launch, together = prepared(), threading.Barrier(8)

    def work(i):
        together.wait(timeout=60)
        launch(1, 1, 1, 77 + i % 2, None, i, 0.5)

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, i) for i in range(8)]:
            future.result(timeout=60)
    assert sorted(params[0] for _, _, params in core.launched) == list(range(8))


def test_another_error_of_a_new_thread_is_said_in_words(core):
    def refuse(*args):
        raise RuntimeError("CUDA_ERROR_INVALID_VALUE: too many threads")

    core.launch = refuse
    with pytest.raises(BackendError, match=r"launching kernel on a grid of \(1, 1, 1\).*INVALID_VALUE"):
        in_a_new_thread(prepared(), 1, 1, 1, 77, None, 5, 0.5)


def test_zeros_of_both_signs_are_passed_as_they_are(core):
    """They are equal, and so one key of whatever remembers values."""
    core.Device(0).set_current()
    launch = prepared()
    for zero in (0.0, -0.0, 0.0):
        launch(1, 1, 1, 77, None, 5, zero)
    assert [params for _, _, params in core.launched] == [(5, 0), (5, 1 << 31), (5, 0)]


def test_a_shape_with_less_shared_memory_leaves_what_others_need(core, monkeypatch):
    """The limit belongs to the kernel, of which each launch shape has a `Launch`."""
    from cuda.bindings import driver as bindings

    limits = {}
    done = bindings.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(bindings, "cuKernelGetAttribute", lambda a, kernel, device: (done, limits.get((a, kernel), 0)))
    monkeypatch.setattr(
        bindings, "cuKernelSetAttribute", lambda a, n, kernel, device: (limits.update({(a, kernel): n}) or done,)
    )
    loaded = driver.Loaded(SimpleNamespace(device=0, handle=5), "kernel", 0, 0)
    for shared_bytes in (100 << 10, 60 << 10, 120 << 10, 8 << 10):
        driver.Launch(loaded, "if", block=(128, 1, 1), shared_bytes=shared_bytes)
    assert list(limits.values()) == [120 << 10]
