"""Parts of the cache's tests: a key, a build that counts itself over processes, and processes that can be killed."""

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewright.jit import cache
from tilewright.jit.cache import BuildKey, Built

BINARY = bytes(range(256)) * 8


def key(name: str = "copy", **changed: Any) -> BuildKey:
    """A key of no real compiler."""
    fields: dict[str, Any] = {
        "kind": "cuda",
        "arch": "sm_90a",
        "flags": ("-O3",),
        "source": "__global__ void copy() {}\n",
        "compiler": "nvrtc 13.0.88",
    }
    return BuildKey(name=name, **{**fields, **changed})


class Builds:
    """A build that leaves one line in a file each time it runs, whichever process runs it."""

    def __init__(self, folder: Path, binary: bytes = BINARY) -> None:
        self._log, self._binary = folder / "builds.txt", binary

    def __call__(self) -> Built:
        with self._log.open("a") as log:
            log.write(f"{os.getpid()}\n")
        return Built(self._binary, {"symbol": "copy", "registers": 32}, {"ptx": b".version 9.0"})

    @property
    def count(self) -> int:
        return len(self._log.read_text().splitlines()) if self._log.exists() else 0


def start(action: Callable[[], Any]) -> int:
    """A process of its own that does `action` with an empty memory layer and exits with 0, or 1 if that raised."""
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: the test runner has threads
        pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # a child that hangs ends, and its test fails
        try:
            cache.forget()
            action()
            os._exit(0)
        except BaseException:  # noqa: BLE001  (a child must not return into the test runner)
            traceback.print_exc()
            os._exit(1)
    return pid


def finish(pid: int) -> int:
    """Wait for a process: its exit code, negative for the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die() -> None:
    """End this process at once, with nothing tidied up."""
    os.kill(os.getpid(), signal.SIGKILL)


class Gate:
    """A point where a process waits until another opens it."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def wait(self) -> None:
        os.read(self._read, 1)

    def open(self, times: int = 1) -> None:
        os.write(self._write, b"." * times)
