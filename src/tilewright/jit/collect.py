"""Compile without launching: inside `collect(arch)` every kernel object that is called leaves a job instead.

    with collect("sm_90a") as collector:
        plan.launch(outs, *args, config=plan.config)    # fake tensors: sizes, strides and types, no memory
    artifacts = [job.compile() for job in collector.jobs]

What is compiled is what would be launched, because the implementation's own launch code chose it.  A kernel object
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
    """One kernel to compile.  key: equal for equal binaries, None where the kernel object does not say."""

    name: str
    compile: Callable[[], "Artifact"]
    key: Hashable = None


class Collector:
    """Jobs of one block, without repetitions.  arch: the machine, as `device_info(...).arch` names it."""

    def __init__(self, arch: str) -> None:
        self.arch = machine(arch)
        self.jobs: list[Job] = []
        self._seen: set[Hashable] = set()

    def add(self, name: str, compile: Callable[[], "Artifact"], key: Hashable = None) -> None:
        """Note that kernel `name` is needed; a job with a `key` that is already there is left out."""
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
    """The collector in force here, if any.  Costs one read of a context variable."""
    return _active.get()
