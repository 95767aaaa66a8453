"""Compile without launching: inside `collect(arch)` a call of a kernel object adds a job instead.

    with collect("sm_90a") as collector:
        plan.launch(outs, *args, config=plan.config)    # fake tensors: sizes, strides and types, no memory
    artifacts = [job.compile() for job in collector.jobs]

The jobs compile exactly what would be launched, because the launch code itself selects the kernels.  A kernel object
of any language begins its `__call__` with

    collector = collecting()
    if collector is not None:
        collector.add(name, lambda: self.compile(arch=collector.arch, ...))
        return

Pointers of the fake tensors count as aligned to 16 bytes, which is what torch's allocators give.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from tilewright.hardware.known import machine

if TYPE_CHECKING:
    from tilewright.jit.cache import Artifact

__all__ = ["Collector", "Job", "collect", "collecting", "machine"]


class Job(NamedTuple):
    """One kernel to compile.  key: equal for equal binaries; None if the kernel object has none."""

    name: str
    compile: Callable[[], "Artifact"]
    key: Hashable = None


class Collector:
    """The jobs of one block, without duplicates.  arch: the machine, as in `device_info(...).arch`."""

    def __init__(self, arch: str) -> None:
        self.arch = machine(arch)
        self.jobs: list[Job] = []
        self._seen: set[Hashable] = set()

    def add(self, name: str, compile: Callable[[], "Artifact"], key: Hashable = None) -> None:
        """Add a job for the kernel `name`, unless one with the same `key` exists."""
        if key is not None:
            if key in self._seen:
                return
            self._seen.add(key)
        self.jobs.append(Job(name, compile, key))


_active: ContextVar[Collector | None] = ContextVar("tilewright_collecting", default=None)


@contextmanager
def collect(arch: str) -> Iterator[Collector]:
    """Collect the kernels that the block would launch on `arch` ("sm_90a", "sm_90", "gfx942", "cpu")."""
    collector = Collector(arch)
    token = _active.set(collector)
    try:
        yield collector
    finally:
        _active.reset(token)


def collecting() -> Collector | None:
    """The active collector, if any.  Costs one read of a context variable."""
    return _active.get()
