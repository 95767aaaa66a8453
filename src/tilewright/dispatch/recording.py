"""Record which plans a program needs, without touching it: warm-up, `tune MODEL` and `explain` are built on this."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.dispatch.raw import RawOp
    from tilewright.dispatch.select import Plan

_active: ContextVar["Recording | None"] = ContextVar("tilewright_recording", default=None)


@dataclass
class Recording:
    """`plans`: each distinct plan in order of first use.  `calls`: (raw op, arguments, backend, numerics) of each call."""

    plans: list["Plan"] = field(default_factory=list)
    calls: list[tuple["RawOp", tuple[Any, ...], str, str]] = field(default_factory=list)

    def add(self, raw: "RawOp", args: tuple[Any, ...], backend: str, numerics: str, plan: "Plan") -> None:
        """Note one selection."""
        self.calls.append((raw, args, backend, numerics))
        if plan not in self.plans:
            self.plans.append(plan)


@contextmanager
def record() -> Iterator[Recording]:
    """List every (op, bucket, plan) the block needs.  Works under FakeTensorMode, where nothing is launched."""
    outer = _active.get()
    recording = Recording()
    token = _active.set(recording)
    try:
        yield recording
    finally:
        _active.reset(token)
        if outer is not None:
            outer.calls.extend(recording.calls)
            outer.plans.extend(p for p in recording.plans if p not in outer.plans)


def recording() -> Recording | None:
    """The innermost recording in force, if any."""
    return _active.get()
