"""The changes in force on one model: the last one put on is the first one taken off."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import nn

from tilewright.assistant.changes.protocol import Applied, Change
from tilewright.assistant.workload import Workload


@runtime_checkable
class Refreshable(Protocol):
    """An applied change that recorded the model (captured graphs, compiled steps).

    When other changes come or go, it forgets what it recorded; the next call records again.
    """

    def refresh(self) -> None: ...


class Stack:
    """`changes` is the plan; the first `len(self)` of them are in force."""

    def __init__(self, model: nn.Module, work: Workload) -> None:
        self.model = model
        self.changes: list[Change] = []
        self._work = work
        self._applied: list[Applied] = []

    def __len__(self) -> int:
        return len(self._applied)

    def push(self, change: Change) -> Applied:
        """Apply one more change. If it cannot be applied, the model is as before."""
        applied = change.apply(self.model, self._work)
        del self.changes[len(self._applied) :]
        self.changes.append(change)
        self._applied.append(applied)
        self._refresh(skip=applied)
        return applied

    def pop(self) -> Change:
        """Undo the last change and take it out of the plan."""
        self._applied.pop().undo()
        change = self.changes.pop()
        self._refresh()
        return change

    def at(self, count: int) -> None:
        """Have exactly the first `count` changes of the plan in force; the plan stays."""
        if count == len(self):
            return
        while len(self) > count:
            self._applied.pop().undo()
        while len(self) < count:
            self._applied.append(self.changes[len(self)].apply(self.model, self._work))
        self._refresh()

    def _refresh(self, skip: Applied | None = None) -> None:
        for applied in self._applied:
            if applied is not skip and isinstance(applied, Refreshable):
                applied.refresh()
