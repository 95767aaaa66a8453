"""Lines of progress, each with its step and the number of steps."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]


class Steps:
    """Counts the steps of a run and puts the count before each line."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._step = 1
        self._total: int | None = None

    def plan(self, more: int) -> None:
        """Say that `more` steps follow the current one."""
        self._total = self._step + more

    def next(self) -> None:
        """Begin the next step."""
        self._step += 1

    def __call__(self, line: str) -> None:
        """Report one line of the current step."""
        if self._progress is not None:
            count = f"step {self._step}" if self._total is None else f"step {self._step} of {self._total}"
            self._progress(f"{count}, {line}")
