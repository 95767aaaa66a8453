"""What a report holds: what was observed, tried, measured and decided. These dataclasses are its JSON schema."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from tilewright.assistant.changes.protocol import Change
from tilewright.assistant.observation.observe import Observation
from tilewright.assistant.predict import Prediction, Roof
from tilewright.assistant.timing.decide import Noise
from tilewright.assistant.timing.measure import Comparison
from tilewright.assistant.verify import Accuracy

SCHEMA = "tilewright.optimize/1"

Kind = Literal["optimize", "analyze"]
Decision = Literal["kept", "rejected", "not judged", "not applicable", "not tried", "proposed"]


@dataclass
class ChangeRecord:
    """One change: its predicted and its measured gain, the decision, and the reason.

    why, source, risk: as the change states them. detail: what it replaced in this model. reason: one or two sentences.
    preparation_s: seconds of its first calls, including compilation or graph capture. seconds: all time spent on it.
    """

    name: str
    why: str
    source: str
    risk: str
    decision: Decision
    reason: str
    detail: str = ""
    predicted: Prediction | None = None
    measured: Comparison | None = None
    accuracy: Accuracy | None = None
    preparation_s: float | None = None
    seconds: float = 0.0

    @staticmethod
    def of(change: Change, decision: Decision, reason: str, predicted: Prediction | None = None) -> ChangeRecord:
        """A record of `change` with nothing measured yet."""
        return ChangeRecord(change.name, change.why, change.source, change.risk, decision, reason, predicted=predicted)


@dataclass
class Document:
    """One run of `optimize` (or of `analyze`, which has no control, totals or accuracy).

    control: two unchanged copies timed against each other, which shows the noise of this machine.
    totals: the unchanged model against the final one, timed together after all decisions.
    seconds: wall time of each stage.
    commit: of the checkout that ran (`bench.commit`); empty for an installed package.
    """

    kind: Kind
    goal: str
    machine: dict[str, Any]
    model: dict[str, Any]
    workload: dict[str, Any]
    before: Observation
    roofs: list[Roof]
    changes: list[ChangeRecord]
    after: Observation | None = None
    control: Comparison | None = None
    totals: Comparison | None = None
    accuracy: Accuracy | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    commit: str = ""
    schema: str = SCHEMA

    def decided(self, decision: Decision) -> list[ChangeRecord]:
        """The changes with this decision, in the order they were tried."""
        return [change for change in self.changes if change.decision == decision]

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        if self.kind == "analyze":
            return f"{len(self.decided('proposed'))} changes are worth trying on {self.model['class']}."
        if self.totals is None and self.control is not None and Noise.of(self.control).too_noisy:
            return f"Nothing was kept: {Noise.of(self.control).sentence}. {self.model['class']} is unchanged."
        if self.totals is None and not (self.decided("rejected") or self.decided("not judged")):
            return f"No change was tried on {self.model['class']}: {self._why_untried()}"
        if self.totals is None:
            unjudged, untried = len(self.decided("not judged")), len(self.decided("not tried"))
            tried = len(self.decided("rejected")) + unjudged
            if unjudged:
                return (
                    f"{tried} changes were tried on {self.model['class']} and none was kept; the machine was too noisy "
                    f"to judge {unjudged} of them. It is unchanged."
                )
            if untried:
                return (
                    f"{tried} of {tried + untried} changes were tried on {self.model['class']} and none was kept; "
                    "the time budget ended before the others. It is unchanged."
                )
            return f"Nothing made {self.model['class']} faster beyond the noise of this machine. It is unchanged."
        gain = self.totals.decisive
        names = ", ".join(change.name for change in self.decided("kept"))
        accuracy = "" if self.accuracy is None else f"; logit error {_errors(self.accuracy)}"
        name = f"{gain.name} CPU time" if self.totals.clock == "cpu" else gain.name
        return (
            f"{self.model['class']}: {name} {gain.before:.4g} to {gain.after:.4g} {gain.unit}, "
            f"{gain.gain:.2f}x (95 %: {gain.gain_low:.2f} to {gain.gain_high:.2f}) by {names}{accuracy}."
        )

    @property
    def code(self) -> str:
        """Three lines that put the kept changes on a copy of the model; "" where nothing was kept."""
        names = [change.name for change in self.decided("kept")]
        if not names:
            return ""
        inputs = "" if self.workload["new_tokens"] else ", inputs"
        if "tuned_ops" in names:
            inputs += ', table="tuned_ops.json"'  # as `save` writes it
        return (
            "from tilewright.assistant import apply_changes\n"
            f"model = ...  # your {self.model['class']} in evaluation mode, as you load it\n"
            f"apply_changes(model, {names!r}{inputs})"
        )

    def _why_untried(self) -> str:
        untried = len(self.decided("not tried"))
        return f"the time budget ended before {untried} of them; raise it." if untried else "none applies."

    def to_json(self) -> str:
        """This report as JSON text. A number that is not finite becomes null."""
        return json.dumps(_finite(asdict(self)), separators=(",", ":")) + "\n"


def _errors(accuracy: Accuracy) -> str:
    return f"{accuracy.error:.1e}, {accuracy.own_error:.1e} before"


def _finite(value: Any) -> Any:
    """Make `value` fit for JSON: a float that is not finite becomes None, others keep six digits, as measured."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
