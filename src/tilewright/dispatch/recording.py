"""Record which plans a program needs, without touching it: warm-up, `tune MODEL` and `explain` are built on this."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.dispatch.raw import RawOp
    from tilewright.dispatch.select import Plan

_active: list["Recording"] = []
"""Recordings of the whole process, not of one thread: autograd runs backwards on its own threads."""


@dataclass(eq=False)  # one leaves the list in force, not the first that has noted the same
class Recording:
    """`plans`: each distinct plan in order of first use.  `calls`: (raw op, arguments, backend, numerics) of each
    call.
    """

    plans: list["Plan"] = field(default_factory=list)
    calls: list[tuple["RawOp", tuple[Any, ...], str, str]] = field(default_factory=list)

    def add(self, raw: "RawOp", args: tuple[Any, ...], backend: str, numerics: str, plan: "Plan") -> None:
        """Note one selection."""
        self.calls.append((raw, args, backend, numerics))
        if plan not in self.plans:
            self.plans.append(plan)


@contextmanager
def record(recording: Recording | None = None) -> Iterator[Recording]:
    """List every (op, bucket, plan) the process selects during the block, backwards included.

    Works under FakeTensorMode, where nothing is launched.   recording: one of the caller's own, whose `add` hears of
    each; the tensors of all calls stay alive in one of ours.
    """
    if recording is None:
        recording = Recording()
    _active.append(recording)
    try:
        yield recording
    finally:
        _active.remove(recording)


def recordings() -> list["Recording"]:
    """The recordings in force."""
    return _active
