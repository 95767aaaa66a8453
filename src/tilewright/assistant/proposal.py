"""Proposals: the changes that apply to a model, each with the reason and the predicted gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.assistant.changes import Change, Scene, Verdict
from tilewright.assistant.document import ChangeRecord
from tilewright.assistant.predict import Prediction
from tilewright.assistant.wording import first_line
from tilewright.log import logger


@dataclass(frozen=True)
class Proposal:
    """A change to try, with its predicted gain."""

    change: Change
    reason: str
    predicted: Prediction


def propose(scene: Scene, candidates: Sequence[Change]) -> tuple[list[ChangeRecord], list[Proposal]]:
    """Return records of the changes that do not apply, and proposals of those that do: by stage, and within a stage the
    largest predicted gain first.
    """
    inapplicable, proposals = [], []
    for change in candidates:
        try:
            verdict = change.applies(scene)
            predicted = change.predict(scene) if verdict.ok else None
        except Exception as error:  # noqa: BLE001  a rule that fails on an unforeseen model must not end the run
            logger.warning("change %s could not look at the model", change.name, exc_info=True)
            verdict, predicted = Verdict(False, f"looking at the model failed: {first_line(error)}"), None
        if predicted is None:
            inapplicable.append(ChangeRecord.of(change, "not applicable", verdict.reason))
        else:
            proposals.append(Proposal(change, verdict.reason, predicted))
    return inapplicable, sorted(proposals, key=lambda item: (item.change.stage, -item.predicted.high))
