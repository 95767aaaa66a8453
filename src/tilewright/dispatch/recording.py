"""Record which plans a program needs, without touching it: warm-up, `tune MODEL` and `explain` are built on this."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import get_ident
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


class _Noted(Exception):
    """The call is known; nothing computes it."""


@dataclass(eq=False)
class _FirstCall(Recording):
    """Ends a call of this thread when it is noted: a reference on fake tensors takes most of the time."""

    thread: int = field(default_factory=get_ident)

    def add(self, *call: Any) -> None:
        if get_ident() == self.thread:
            super().add(*call)
            raise _Noted


def first_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple["RawOp", tuple[Any, ...], str, str]:
    """The first call that `function` makes, as a recording notes it; neither that call nor what follows is computed."""
    with suppress(_Noted), record(_FirstCall()) as notes:
        function(*args, **kwargs)
    (call,) = notes.calls
    return call
