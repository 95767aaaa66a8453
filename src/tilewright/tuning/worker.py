"""The worker process: `python -m tilewright.tuning.worker FD` answers requests that come over a pipe.

A request is (name, arguments); the answer is ("done", value), ("failed", reason) or, from a worker that can no longer
be used, ("lost", reason).
"""

import ctypes
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch

from tilewright.tuning.compiling import compile_candidate
from tilewright.tuning.problem import Problem
from tilewright.tuning.subject import Subject

_PR_SET_PDEATHSIG = 1


class Worker:
    """One method for each request.  The problem of the last one is kept: its inputs and its oracle take seconds."""

    def __init__(self) -> None:
        self._subject: Subject | None = None

    def compile(self, problem: Problem, backend: str, config: Any, default: bool) -> str | None:
        """See `compile_candidate`."""
        return compile_candidate(problem, backend, config, default)

    def prepare(self, problem: Problem) -> None:
        """Make the inputs of a problem, and the standards its results are judged by."""
        self._subject = None  # frees the last one's memory first
        device = torch.device(problem.device)
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
            torch.cuda.empty_cache()
            # The default stream cannot be captured, and autograd replays a backward on its forward's stream
            torch.cuda.set_stream(torch.cuda.Stream())
        self._subject = Subject(problem)

    def check(self, backend: str, config: Any) -> str | None:
        """Why the candidate is wrong; None when it is right."""
        return self._prepared.check(backend, config)

    def time(self, choices: list[tuple[str, Any]], rounds: int) -> list[list[float] | str]:
        """Microseconds of each choice, one for each round; or why it has none."""
        return self._prepared.time(choices, rounds)

    @property
    def _prepared(self) -> Subject:
        assert self._subject is not None, "prepare comes first"
        return self._subject


def serve(connection: Connection) -> None:
    """Answer requests until the other side closes the pipe."""
    worker = Worker()
    connection.send(("done", None))
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = "done", getattr(worker, name)(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever a candidate raises is its result
            answer = "failed" if _usable() else "lost", _short(error)
        connection.send(answer)
        if answer[0] == "lost":
            return


def _usable() -> bool:
    """True if the device still works: an illegal access makes every later call of its context fail."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def _die_with_parent() -> None:
    """Ask the kernel to kill this process with its parent: a hanging candidate must not outlive a killed tuner."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _die_with_parent()
    serve(Connection(int(sys.argv[1])))
