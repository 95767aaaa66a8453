"""CUDA graphs under capture: the graph of the current stream, and the objects it keeps alive.

A graph holds addresses, not tensors.  A CUDA user object ties memory to it: its destructor runs once the graph and all
its instances are destroyed and have finished.  A destructor may not call CUDA or Python, so it posts a semaphore, and
`release` drops the tensors of posted ones.
"""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from tilewright.errors import BackendError
from tilewright.hardware.device import raw_device, raw_stream

_MOVE_REFERENCE, _NO_DESTRUCTOR_SYNC, _RELAXED = 1, 1, 2  # of cuda.h
_SEMAPHORE_BYTES = 64  # sem_t is 32 with glibc

_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_lock = threading.Lock()
_held: list[tuple[int, Any]] = []
"""(address of a semaphore, objects its graph needs); 0 without a driver: kept until the process ends."""


class Capture(NamedTuple):
    """A capture in progress.  number: unique in the process.  Both are None without a CUDA driver (AMD)."""

    number: int | None
    graph: int | None


def current_capture(device: torch.device) -> Capture | None:
    """The capture that the current stream of a GPU takes part in, if any."""
    if _capturing is None or not torch.cuda.is_initialized():
        return None
    index = raw_device() if device.index is None else device.index
    if index == raw_device():
        return _capture(index) if _capturing() else None
    with torch.cuda.device(index):
        return _capture(index) if _capturing() else None


def _capture(index: int) -> Capture:
    driver = _driver()
    if driver is None:
        return Capture(None, None)
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    _call(
        driver.cuStreamGetCaptureInfo_v2,
        ctypes.c_void_p(raw_stream(index)),
        ctypes.byref(status),
        ctypes.byref(number),
        ctypes.byref(graph),
        None,
        None,
    )
    return Capture(number.value, graph.value)


def hold(capture: Capture, needed: Any) -> None:
    """Keep `needed` alive as long as the captured graph or an instance of it exists."""
    release()
    semaphore = 0
    if capture.graph is not None:
        driver, libc = _driver(), _libc()
        semaphore = libc.malloc(_SEMAPHORE_BYTES)
        libc.sem_init(semaphore, 0, 0)
        destroyed = ctypes.cast(libc.sem_post, ctypes.c_void_p)
        user_object = ctypes.c_void_p()
        _call(driver.cuUserObjectCreate, ctypes.byref(user_object), semaphore, destroyed, 1, _NO_DESTRUCTOR_SYNC)
        _call(driver.cuGraphRetainUserObject, ctypes.c_void_p(capture.graph), user_object, 1, _MOVE_REFERENCE)
    with _lock:
        _held.append((semaphore, needed))


def release() -> int:
    """Drop the objects of destroyed graphs.  Returns the number of captures whose objects are still held."""
    if not _held:
        return 0
    destroyed: list[tuple[int, Any]] = []
    alive: list[tuple[int, Any]] = []
    with _lock:
        for entry in _held:
            is_destroyed = entry[0] and _libc().sem_trywait(entry[0]) == 0
            (destroyed if is_destroyed else alive).append(entry)
        _held[:] = alive
    for semaphore, _ in destroyed:
        _libc().free(semaphore)
    return len(alive)


@contextmanager
def captured(
    graph: torch.cuda.CUDAGraph,
    device: torch.device,
    *,
    stream: torch.cuda.Stream | None = None,
    pool: Any = None,
    error_mode: str = "global",
    generators: Sequence[torch.Generator] = (),
) -> Iterator[None]:
    """`torch.cuda.graph(graph, ...)`, which leaves the device usable also where the capture fails.

    torch leaves the capture's stream current then, and generators in capture state, so that the next random number
    raises; the end of another capture resets them.   generators: those that the graph draws from, besides the default.
    """
    before = torch.cuda.current_stream(device)
    for generator in generators:
        graph.register_generator_state(generator)
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=error_mode):
            yield
    except BaseException:
        torch.cuda.set_stream(before)
        another = torch.cuda.CUDAGraph()
        for generator in generators:
            another.register_generator_state(generator)
        with torch.cuda.graph(another, stream=stream, capture_error_mode=error_mode):
            torch.zeros(1, device=device)
        raise


@contextmanager
def outside_captures() -> Iterator[None]:
    """Allow this thread to wait for work that is in no capture, while it or another thread captures."""
    driver = _driver()
    if driver is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    _call(driver.cuThreadExchangeStreamCaptureMode, ctypes.byref(mode))
    try:
        yield
    finally:
        _call(driver.cuThreadExchangeStreamCaptureMode, ctypes.byref(mode))


def _call(function: Any, *args: Any) -> None:
    error = function(*args)
    if error:
        raise BackendError(f"CUDA error {error} of {function.__name__} while a CUDA graph was captured.")


@cache
def _driver() -> Any:
    """libcuda; None for an AMD GPU, where nothing is kept across captures."""
    if torch.version.hip:
        return None
    library = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    library.cuStreamGetCaptureInfo_v2.argtypes = [pointer] * 6
    library.cuUserObjectCreate.argtypes = [pointer, pointer, pointer, number, number]
    library.cuGraphRetainUserObject.argtypes = [pointer, pointer, number, number]
    library.cuThreadExchangeStreamCaptureMode.argtypes = [pointer]
    return library


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None)
    library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
    library.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    library.sem_trywait.argtypes = [ctypes.c_void_p]
    return library
