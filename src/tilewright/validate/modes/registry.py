"""The list of modes.  A mode is a function (case, findings) that runs the op one way and judges the results."""

from collections.abc import Callable
from dataclasses import dataclass

from tilewright.validate.case import Case, Findings

Run = Callable[[Case, Findings], None]


@dataclass(frozen=True)
class Mode:
    """One execution mode.

    heavy     takes seconds (compilation)
    once      depends on the op and dtype, not on the sizes
    computes  runs the op; others only test calls that are refused before a launch
    """

    name: str
    doc: str
    run: Run
    heavy: bool
    once: bool
    computes: bool = True


MODES: dict[str, Mode] = {}
"""Every mode by name, in the order they run."""


def mode(name: str, *, heavy: bool = False, once: bool = False, computes: bool = True) -> Callable[[Run], Run]:
    """Register the decorated function; the first line of its docstring describes the mode."""

    def register(run: Run) -> Run:
        MODES[name] = Mode(name, (run.__doc__ or "").strip().split("\n")[0], run, heavy, once, computes)
        return run

    return register
