"""A worker process with a time limit: it answers in time, or it is killed and the reason is recorded.

The worker is started as `python -P -m`, not forked: it shares no CUDA context with its parent, a script that tunes
needs no `if __name__ == "__main__"`, and a file in the current folder is imported only if the parent would import it.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

START_S = 120.0  # the worker imports torch and the ops: seconds, and more on a busy machine


class WorkerFailed(Exception):
    """The request raised in the worker, which still runs.  The text is the reason."""


class WorkerLost(WorkerFailed):
    """The worker hung, crashed or lost its device, and is gone.  The text is the reason."""

    def __init__(self, reason: str, *, hung: bool = False) -> None:
        super().__init__(reason)
        self.hung = hung


class Watched:
    """One worker: `ask`, or `send` and later `answer`.  A request starts a process if there is none."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._started = False  # True once the process has sent its first message
        self._limit = self.deadline = 0.0
        self.generation = 0
        """Number of processes started so far."""

    @property
    def alive(self) -> bool:
        """True while there is a process."""
        return self._process is not None

    @property
    def connection(self) -> Connection:
        """Readable when the worker has sent something; see `settled`."""
        return self._connection

    def ask(self, request: str, *arguments: Any, timeout: float) -> Any:
        """Return the worker's answer.  Raises WorkerFailed, and WorkerLost after `timeout` seconds."""
        self.send(request, *arguments, timeout=timeout)
        return self.answer()

    def send(self, request: str, *arguments: Any, timeout: float) -> None:
        """Send a request, and start a process if there is none; the start does not count towards `timeout`."""
        if self._process is not None and self._process.poll() is not None:  # it died idle
            self.close()
        if self._process is None:
            self._start()
        self._limit = timeout
        self.deadline = time.monotonic() + (timeout if self._started else START_S)
        with suppress(OSError):  # the process has just died: `answer` reports it
            self._connection.send((request, *arguments))

    def settled(self) -> bool:
        """True if `answer` would return at once.  Reads the start message, from which the time limit counts."""
        if not self._started and self._connection.poll(0):
            try:
                self._connection.recv()
            except (EOFError, OSError):
                return True
            self._started = True
            self.deadline = time.monotonic() + self._limit
        return self._connection.poll(0) or time.monotonic() >= self.deadline

    def answer(self) -> Any:
        """Wait for the answer to the current request."""
        assert self._process is not None, "nothing was asked"
        try:
            while not self.settled():
                self._connection.poll(max(0.0, self.deadline - time.monotonic()))
            if not self._connection.poll(0):
                late = f"no answer in {self._limit:g} s" if self._started else f"not started in {START_S:g} s"
                self.close()
                raise WorkerLost(f"hung: {late}", hung=True)
            kind, value = self._connection.recv()
        except (EOFError, OSError):
            reason = self._last_words(self._process.wait())
            self.close()
            raise WorkerLost(reason) from None
        if kind == "lost":
            self.close()
            raise WorkerLost(value)
        if kind == "failed":
            raise WorkerFailed(value)
        return value

    def close(self) -> None:
        """Kill the process and the compilers it has started."""
        if self._process is not None:
            with suppress(ProcessLookupError):  # all of them have ended
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
            self._started = False
            self._connection.close()
            self._errors.close()

    def _start(self) -> None:
        self._connection, worker_end = Pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tilewright.tuning.worker", str(worker_end.fileno())],
            pass_fds=[worker_end.fileno()],
            env={**os.environ, "PYTHONPATH": path, "TILEWRIGHT_AUTOTUNE": "off", **self._environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
        )
        worker_end.close()
        self.generation += 1

    def _last_words(self, status: int) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        how = f"crashed: {signal.Signals(-status).name}" if status < 0 else f"crashed: exit status {status}"
        return f"{how}, {lines[-1][:200]}" if lines else how
