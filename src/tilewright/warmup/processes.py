"""Plan in a process whose environment names the target GPU, and compile in one process for each kernel.

The planning process is spawned, because device properties are cached once they are read.  The compiling ones are
forked from it: they inherit jobs and loaded libraries, give all memory back when they end, and if a compiler crashes,
only its own kernel fails.  NVRTC runs in a new process below each of them.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from tilewright.errors import BackendError, TilewrightError
from tilewright.jit.collect import Job
from tilewright.jit.compilers import nvrtc
from tilewright.warmup.planning import Failure, Planned, plan
from tilewright.warmup.scope import Scope


class Kernel(NamedTuple):
    """One compiled kernel.   folder: its entry in the cache.   info: what the compiler reports."""

    arch: str
    name: str
    kind: str
    folder: str
    seconds: float
    info: dict[str, Any]


class PlanSummary(NamedTuple):
    """The planning of one machine is done: counts of kernels and distinct calls; torch computes `by_torch` of these."""

    arch: str
    kernels: int
    calls: int
    by_torch: int


Event = PlanSummary | Kernel | Failure


def events(scope: Scope, arch: str, at_once: int, hide_gpus: bool) -> Iterator[Event]:
    """Everything that happens while `arch` is prepared, as it happens: `PlanSummary`, then kernels and failures.

    hide_gpus: plan for the architecture as such, whatever GPU is here.  Raises what planning raises.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_work, args=(scope, arch, at_once, sender))
    with _environment(arch, hide_gpus):
        process.start()
    sender.close()
    try:
        while (event := _next(receiver, process)) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event
    finally:
        if process.is_alive():
            process.terminate()
        process.join()


def _next(receiver: Connection, process: Any) -> Any:
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        raise BackendError(f"the process that plans what to compile died ({_death(process.exitcode)}).") from None


@contextmanager
def _environment(arch: str, hide_gpus: bool) -> Iterator[None]:
    """Set what the planning process inherits: the architecture to plan for and, with `hide_gpus`, no visible GPU."""
    changed = {
        "TILEWRIGHT_ARCH": "" if arch == "cpu" else arch,
        "TRITON_INTERPRET": "0",
        "PYTHONSAFEPATH": "1",  # else a `multiprocessing.py` in the current folder would be imported
    }
    if hide_gpus:
        changed["CUDA_VISIBLE_DEVICES"] = ""
    saved = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in saved.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _work(scope: Scope, arch: str, at_once: int, sender: Connection) -> None:
    """Plan and compile; runs in the planning process."""
    import torch

    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    try:
        calls, others = scope.needs(arch)
        planned = plan(calls, arch, scope.backends, others)
        sender.send(PlanSummary(arch, len(planned.jobs), planned.calls, planned.by_torch))
        for failure in planned.failures:
            sender.send(failure)
        for event in _compile_all(planned, at_once):
            sender.send(event)
        sender.send(None)
    except TilewrightError as error:
        sender.send(error)


def _compile_all(planned: Planned, at_once: int) -> Iterator[Kernel | Failure]:
    """Compile every job, `at_once` at a time, each in a child of this process; yields them as they end."""
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(planned.jobs))
    running: dict[Connection, tuple[Job, Any]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            receiver, sender = context.Pipe(duplex=False)
            job = waiting.pop()
            child = context.Process(target=_compile, args=(planned.arch, job, sender))
            child.start()
            sender.close()
            running[receiver] = job, child
        ended = wait(list(running))
        for receiver in [each for each in running if each in ended]:
            job, child = running.pop(receiver)
            try:
                event: Kernel | Failure = receiver.recv()
                child.join()
            except EOFError:
                child.join()
                event = Failure(planned.arch, job.name, f"its compiler's process died ({_death(child.exitcode)})")
            yield event


def _compile(arch: str, job: Job, sender: Connection) -> None:
    """Compile one kernel into the cache and send the result; runs in a child."""
    began = time.monotonic()
    nvrtc.compiler.fresh_process = True  # beside a CUDA build of torch, NVRTC 13.0 crashed in forked processes
    try:
        artifact = job.compile()
    except Exception as error:  # noqa: BLE001 - compilers raise whatever they like, and it is the result
        sender.send(Failure(arch, job.name, f"{type(error).__name__}: {error}"))
        return
    if artifact.path is None:
        sender.send(
            Failure(arch, job.name, "compiled, but the kernel cache cannot be written; see TILEWRIGHT_CACHE_DIR")
        )
        return
    key, seconds = artifact.key, time.monotonic() - began
    sender.send(Kernel(arch, key.name, key.kind, key.folder, seconds, dict(artifact.info)))


def _death(code: int | None) -> str:
    return f"signal {-code}, perhaps for want of memory" if code is not None and code < 0 else f"exit code {code}"
