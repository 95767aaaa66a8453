"""What the loop needs to know of a change, and nothing more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import nn

from tilewright.assistant.predict import Prediction
from tilewright.assistant.scene import Scene
from tilewright.assistant.workload import Workload

__all__ = ["Applied", "Budgeted", "Change", "ProcessWide", "Risk", "Scene", "Verdict"]

# exact: the same operations in the same order; rounding: the same mathematics in another order; precision: another
# number format.
Risk = Literal["exact", "rounding", "precision"]


@dataclass(frozen=True)
class Verdict:
    """Whether a change is worth trying here, and why (not)."""

    ok: bool
    reason: str


class Applied(Protocol):
    """A change in force on one model."""

    @property
    def detail(self) -> str:
        """What was done, in words with counts."""

    def undo(self) -> None:
        """Restore the model: same objects, same values, same state_dict."""


class Change(Protocol):
    """One thing that can be done to a model, and undone.

    name: short and stable (`allow=`, JSON). why: the mechanism in one sentence. source: where that is shown.
    stage: order of trial; within a stage the larger predicted gain goes first. A later stage builds on what the earlier
    ones left. preparation_s: seconds that its first calls are known to take, kept free in the budget while others are
    tried; it is not tried with less.
    """

    @property
    def name(self) -> str: ...

    @property
    def why(self) -> str: ...

    @property
    def source(self) -> str: ...

    @property
    def risk(self) -> Risk: ...

    @property
    def stage(self) -> int: ...

    @property
    def preparation_s(self) -> float: ...

    def applies(self, scene: Scene) -> Verdict:
        """Look, change nothing."""

    def predict(self, scene: Scene) -> Prediction:
        """Gain of a request as a range, from the ceilings."""

    def apply(self, model: nn.Module, work: Workload) -> Applied:
        """Change `model` in place. Raises PatchError when it turns out that it cannot."""


@runtime_checkable
class Budgeted(Protocol):
    """A change whose preparation takes a share of the budget, whatever that is."""

    def within(self, budget_s: float) -> Change:
        """The same change for a run of `budget_s` seconds."""


@runtime_checkable
class ProcessWide(Protocol):
    """A change that other models of the process would notice: it is timed in turns, on one model."""

    process_wide: Literal[True]
