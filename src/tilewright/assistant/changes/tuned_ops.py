"""The model's own sizes, tuned for this machine: a table of their fastest kernels, in force while the change is.

A table is in force for the whole process, so this change is put on and taken off one model in turns to be timed.  It
also replaces the linear layers that win by the new rows, on top of what `op_replacement` did or in its place.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from tilewright.assistant.changes.protocol import Risk, Scene, Verdict
from tilewright.assistant.observation.observe import Phase
from tilewright.assistant.predict import Prediction, floor_us, leaves, predict, self_us
from tilewright.assistant.workload import Workload
from tilewright.dispatch.tables import extra, table
from tilewright.errors import PatchError
from tilewright.log import logger
from tilewright.models import Patch
from tilewright.models.patching import plan_patch
from tilewright.models.specialise import patched_modules
from tilewright.tuning.model import Size, choices, sizes_of, tune_sizes
from tilewright.tuning.run import Run

SHARE = 0.3
"""The part of a budget that tuning may take."""


class TunedOps:
    """Tune what the model runs, and put the table in force.   table: one that was measured before, in place of that."""

    name: str = "tuned_ops"
    why: str = (
        "Which kernel is fastest, and with which tiles, depends on the sizes; a table of other sizes leaves this "
        "model's to a static guess."
    )
    source: str = "tilewright tune; Ansel et al., 'OpenTuner', 2014"
    risk: Risk = "rounding"
    stage: int = 4
    process_wide: Literal[True] = True

    def __init__(self, seconds: float = 30.0, table: Path | None = None) -> None:
        self.table = table
        self._seconds = seconds

    @property
    def preparation_s(self) -> float:
        """Seconds of tuning; none where the table exists."""
        return self._seconds if self.table is None else 0.0

    def within(self, budget_s: float) -> TunedOps:
        """Its share of a budget."""
        return TunedOps(SHARE * budget_s, self.table)

    def applies(self, scene: Scene) -> Verdict:
        sizes = _sizes(scene.model, scene.work, min(1, scene.work.new_tokens))
        tunable = [size for size in sizes if _has_choice(size, scene.work)]
        if not tunable:
            return Verdict(
                False,
                f"nothing to tune: on {scene.work.device.type} no op of this model has kernels of ours to choose from.",
            )
        due = [size for size in tunable if not size.is_measured]
        if not due:
            return Verdict(False, f"all {len(tunable)} sizes of this model were measured with today's versions.")
        counts = Counter(size.raw.op for size in due)
        ops = ", ".join(f"{count} of {op}" for op, count in counts.most_common())
        return Verdict(True, f"sizes without a measurement of today's versions: {ops}.")

    def predict(self, scene: Scene) -> Prediction:
        def saving(phase: Phase) -> float:
            return sum(
                max(0.0, self_us(phase, [cost]) - floor_us(cost, scene.ceilings, leaf=True)) for cost in leaves(phase)
            )

        return predict(scene, self.name, saving, "what modules take beyond their floors at the rates measured here.")

    def apply(self, model: nn.Module, work: Workload) -> InForce:
        if self.table is None:
            self.table = self._tune(model, work)
        return InForce(model, work, self.table)

    def _tune(self, model: nn.Module, work: Workload) -> Path:
        tunable = [size for size in _sizes(model, work, work.new_tokens) if _has_choice(size, work)]
        due = [size for size in tunable if not size.is_measured]
        folder = Path(tempfile.mkdtemp(prefix="tilewright-tuned-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)  # the table may be in force until then
        path = folder / "tuned_ops.json"
        report = tune_sizes(due, Run(work.device, path=path), self._seconds)
        if not report.tuned:
            reason = next((case.reason for case in report.untuned), "no size is left")
            raise PatchError(f"{self.name}: nothing was tuned in {self._seconds:.0f} s: {reason}")
        return path


class InForce:
    """A table in force, and the linear layers that it replaces."""

    def __init__(self, model: nn.Module, work: Workload, path: Path) -> None:
        self._path = path
        self._rows = len(table.read(path)[1])
        extra.hold(path)
        try:
            self._patch = _replace(model, work)
        except BaseException:
            extra.release(path)
            raise

    @property
    def detail(self) -> str:
        counts = {} if self._patch is None else self._patch.report().counts()
        replaced = ", ".join(f"{count} x {kind}" for kind, count in counts.items())
        return f"{self._rows} sizes tuned" + (f"; replaced {replaced}" if replaced else "")

    def undo(self) -> None:
        if self._patch is not None:
            self._patch.undo()
        extra.release(self._path)


def _replace(model: nn.Module, work: Workload) -> Patch | None:
    """Replace what the tables in force speak for and is not replaced yet."""
    already = next(patched_modules(model), None) is not None
    try:
        patch = plan_patch(model, work.device, ops=["linear"] if already else None)
    except PatchError as error:
        logger.info("tuned_ops: %s", error)
        return None
    patch.apply()
    return patch


def _sizes(model: nn.Module, work: Workload, new_tokens: int) -> Sequence[Size]:
    """What a request for `new_tokens` runs."""
    example: Any = work.examples[0].kwargs or work.examples[0].args
    return sizes_of(model, example, new_tokens=new_tokens)


def _has_choice(size: Size, work: Workload) -> bool:
    return size.refused is None and choices(size, work.device) > 1
