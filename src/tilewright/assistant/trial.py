"""Trials, one change at a time: apply it to a copy, run, verify and time it, decide (`decide`); keep or undo it."""

from __future__ import annotations

import copy
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tilewright.assistant.changes.cast import InDtype
from tilewright.assistant.changes.protocol import Change, ProcessWide, Scene
from tilewright.assistant.document import ChangeRecord
from tilewright.assistant.observation.observe import wall_us, weight_bytes
from tilewright.assistant.predict import Prediction
from tilewright.assistant.proposal import Proposal
from tilewright.assistant.reference import Evaluation, Sample, draw, evaluate
from tilewright.assistant.stack import Stack
from tilewright.assistant.timing.decide import Decision, Noise, decide
from tilewright.assistant.timing.measure import FEWEST_ROUNDS, Comparison, Side, calls, compare
from tilewright.assistant.verify import Accuracy, judge, meaning
from tilewright.assistant.wording import first_line
from tilewright.errors import VerificationError
from tilewright.log import logger
from tilewright.models.wide import dominant_dtype, full_precision, wide_copy, wide_dtype

_EVALUATION_SHARE = 0.01  # of the budget, for the logits of one model; the same again for its decoding
_NOISY_ROUNDS = 16  # of a control that is repeated because of noise, and of each comparison after it
_CONTROL_SHARE = 0.05  # of the budget, for the control
_OTHER_SPEED = 1.5  # a model this much faster has another noise: the control of the slower one says little of it
_TIMING_SHARE = 0.5  # of a change's part of the budget; the rest is for applying, first calls and verification
_LONGEST_TIMING_S = 20.0


class Trials:
    """The model, its copy, and what every change is compared with: reference, unchanged model, control."""

    def __init__(
        self,
        scene: Scene,
        main: Stack,
        *,
        seed: int,
        accept_dtype: torch.dtype | None,
        deadline: float,
        say: Callable[[str], None],
    ) -> None:
        self.main = main
        self.control: Comparison | None = None  # of the unchanged model, for the report
        self._control_now: Comparison | None = None  # of the model as it runs now, for decisions
        self.notes: list[str] = []
        self._scene = scene
        self._request_us: float | None = None  # with what was kept, once something was
        self._work = scene.work
        self._peak = max((phase.peak_bytes or 0 for phase in scene.observation.phases), default=0)
        self._deadline = deadline
        self._say = say
        self._request_s = scene.observation.request_us / 1e6
        self._evaluation_s = 0.0
        self._fewest = FEWEST_ROUNDS
        self._sample = self._draw(scene.model, seed)
        self._reference = self._evaluate_reference(scene.model)
        self._own = self._evaluate_own(scene.model, accept_dtype)
        self.trial = self._copy(scene.model)

    @property
    def in_place(self) -> bool:
        """Whether changes are tried on the model itself, because there was no room for a copy."""
        return self.trial is self.main

    def take_control(self) -> None:
        """Time two unchanged models against each other. If that is noisy, do it again for longer, and on a CPU with one
        thread.
        """
        self._say("timing two unchanged models against each other")
        self._warm_up(self.trial.model)
        self.control = self._control_now = self._compare_equal(self._fewest)
        if not self.noise.too_noisy:
            return
        if self._work.device.type == "cpu" and torch.get_num_threads() > 1:
            torch.set_num_threads(1)
            self.notes.append("Measured with torch.set_num_threads(1): with more, two unchanged models differed.")
        self._say("the machine is noisy: timing them again, for longer")
        self._fewest = _NOISY_ROUNDS
        self.control = self._control_now = self._compare_equal(self._fewest)

    @property
    def noise(self) -> Noise:
        """The noise of this machine, by two equal models that run as fast as the model does now."""
        return Noise.of(self._control_now)

    def in_order(self, proposals: Sequence[Proposal]) -> list[Proposal]:
        """Put the proposals for which there is time first, in their own order; then the rest, the largest gain first.

        Time is set aside for the largest gain, as predicted now, then for the next one, until there is too little.
        """
        left = self._left() - self._final_s()
        gains = {item.change.name: self.predict_now(item).high for item in proposals}
        by_gain = sorted(proposals, key=lambda item: -gains[item.change.name])
        affordable = set()
        for item in by_gain:
            needed = self._trial_s() + self._preparation_s(item.change)
            if needed <= left:
                affordable.add(item.change.name)
                left -= needed
        first = [item for item in proposals if item.change.name in affordable]
        return first + [item for item in by_gain if item.change.name not in affordable]

    def predict_now(self, item: Proposal) -> Prediction:
        """Predict again with the changes kept so far in force; the first prediction if none was kept."""
        if self._request_us is None:
            return item.predicted
        names = tuple(change.name for change in self.trial.changes[: len(self.trial)])
        return item.change.predict(replace(self._scene, in_force=names, request_us=self._request_us))

    def attempt(self, change: Change, predicted: Prediction, *, planned: Sequence[Change]) -> ChangeRecord:
        """Try one change; keep it or undo it. planned: the changes after it, which share the time that is left."""
        record = ChangeRecord.of(change, "rejected", "", predicted)
        began = time.perf_counter()
        left = self._deadline - began
        needed = self._preparation_s(change)
        if left <= needed:
            record.decision, record.reason = "not tried", _too_late(needed, left)
            return record
        if self.noise.too_noisy:
            record.decision, record.reason = "not tried", f"{self.noise.sentence}."
            return record
        count = len(self.trial)
        try:
            self._run(change, record, self._timing_s([change, *planned]))
        except Exception as error:  # noqa: BLE001  the change, the compiler behind it and the model are not ours to trust
            logger.info("change %s failed", change.name, exc_info=True)
            record.reason = f"it failed: {first_line(error)}"
        if record.decision == "kept" and record.measured is not None:
            self._keep(change, record.measured.decisive.gain, last=not planned)
        elif len(self.trial) > count:
            self._say(f"{change.name}: undone")
            self.trial.pop()
        record.seconds = round(time.perf_counter() - began, 3)
        return record

    def finish(self) -> tuple[Comparison | None, Accuracy | None]:
        """Time the unchanged model against the final one, and verify the final one again; (None, None) if nothing was
        kept.

        If the model itself fails the checks that its copy passed, every change is undone and VerificationError raised.
        """
        if not len(self.main):
            return None, None
        self._say("timing the unchanged model against the final one")
        count = len(self.main)
        if self.in_place:
            before, after = (Side(self.main.model, partial(self.main.at, n)) for n in (0, count))
        else:
            self.trial.at(0)
            before, after = Side(self.trial.model), Side(self.main.model)
        totals = compare(before, after, self._work, seconds=self._timing_s([]), fewest=self._fewest)
        self.main.at(count)
        accuracy = self._judge(self.main)
        if not accuracy.passed:
            self.main.at(0)
            raise VerificationError(
                f"the final model failed its accuracy check and was restored: {'; '.join(accuracy.failures)}."
            )
        return totals, accuracy

    def _run(self, change: Change, record: ChangeRecord, seconds: float) -> None:
        """Try `change` and fill in `record`. The change stays on the trial model, unless it could not be applied."""
        self._say(f"{change.name}: applying")
        record.detail = self.trial.push(change).detail
        self._say(f"{change.name}: first calls")
        record.preparation_s = round(self._warm_up(self.trial.model), 3)
        self._say(f"{change.name}: verifying")
        record.accuracy = self._judge(self.trial)
        if not record.accuracy.passed:
            record.reason = f"the accuracy gate: {'; '.join(record.accuracy.failures)}."
            target = getattr(change, "target", None)
            if target is not None and math.isfinite(record.accuracy.error):
                decision, measured = self._time(change, record, seconds)
                if decision == "kept":
                    record.reason += f" {self._offer(target, record.accuracy, measured)}"
            return
        record.decision, record.reason = self._time(change, record, seconds)

    def _keep(self, change: Change, gain: float, *, last: bool) -> None:
        """Put `change`, which the trial model has, on the model too; then take the control again if that pays."""
        self._request_us = (self._request_us or self._scene.observation.request_us) / gain
        if not self.in_place:
            self._say(f"{change.name}: kept, applying it to the model")
            self.main.push(change)
            self._warm_up(self.main.model)
        if gain > _OTHER_SPEED and not last:
            self._retake_control(change)

    def _time(self, change: Change, record: ChangeRecord, seconds: float) -> tuple[Decision, str]:
        """Time the trial model against the one without its last change: the decision, and what was measured."""
        self._say(f"{change.name}: timing against the model without it")
        count = len(self.trial)
        if self.in_place or isinstance(change, ProcessWide):
            before, after = (Side(self.trial.model, partial(self.trial.at, n)) for n in (count - 1, count))
        else:
            before, after = Side(self.main.model), Side(self.trial.model)
        record.measured = compare(before, after, self._work, seconds=seconds, fewest=self._fewest)
        self.trial.at(count)
        return decide(record.measured.decisive, self.noise, clock=record.measured.clock)

    def _offer(self, target: torch.dtype, accuracy: Accuracy, measured: str) -> str:
        """Say what a cast that failed the gate would gain, what it does to the outputs, and how to accept it."""
        if self._work.prompts or accuracy.positions == 0:
            cost = f"top-1 agreement {accuracy.top1:.2%}"
        else:
            cosine, top1 = meaning(self._changed, self._reference)
            cost = f"cosine of its outputs at least {cosine:.6f}, the same largest output in {top1:.2%} of rows"
        name = str(target).removeprefix("torch.")
        option = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[name]
        return (
            f"It would pay: {measured} {cost[0].upper()}{cost[1:]}. "
            f"--accept-dtype {option} (accept_dtype=torch.{name}) accepts this rounding."
        )

    def _warm_up(self, model: nn.Module) -> float:
        began = time.perf_counter()
        with torch.no_grad():
            for fn in calls(model, self._work).values():
                fn()
        if self._work.device.type == "cuda":
            torch.cuda.synchronize(self._work.device)
        return time.perf_counter() - began

    def _judge(self, stack: Stack) -> Accuracy:
        self._changed = evaluate(stack.model, self._work, self._sample, decode=True)
        in_force = stack.changes[: len(stack)]
        rises = [rise for change in in_force if (rise := getattr(change, "perplexity_rise", None)) is not None]
        return judge(self._changed, self._own, self._reference, max(rises, default=None))

    def _retake_control(self, change: Change) -> None:
        """Time two models with all that was kept against each other; a CUDA graph is steadier than eager launches."""
        self._say(f"{change.name}: timing two equal models with it against each other")
        before = self.noise
        self._control_now = self._compare_equal(self._fewest)
        self.notes.append(
            f"With {change.name} two equal models differ by up to {self.noise.limit:.3f}x, without it by up to "
            f"{before.limit:.3f}x: changes after it were held against the former."
        )

    def _compare_equal(self, fewest: int) -> Comparison:
        """Time the model against its copy, both with what was kept so far."""
        seconds = _CONTROL_SHARE * self._left()
        before, after = Side(self.main.model), Side(self.trial.model)
        return compare(before, after, self._work, seconds=seconds, fewest=fewest)

    def _left(self) -> float:
        return max(0.0, self._deadline - time.perf_counter())

    def _trial_s(self) -> float:
        """Least seconds of one trial without compilation: first calls, verification, the fewest rounds of timing."""
        return self._rounds_s(self._control_now)

    def _final_s(self) -> float:
        """The same of the final measurement, half of whose calls are those of the unchanged model."""
        return (self._rounds_s(self.control) + self._rounds_s(self._control_now)) / 2

    def _rounds_s(self, control: Comparison | None) -> float:
        round_s = 0.0 if control is None else control.seconds / control.rounds
        return self._evaluation_s + (self._fewest + 2) * round_s

    def _preparation_s(self, change: Change) -> float:
        """Seconds that a change's first calls take: its own estimate, which is for an idle machine, and more on a busy
        one.
        """
        busy = 0.0 if self.control is None else self.control.busy
        return change.preparation_s / (1 - min(busy, 0.9))

    def _timing_s(self, planned: Sequence[Change]) -> float:
        """Seconds for one comparison: an equal part for each planned change and the final measurement."""
        left = self._left()
        reserved = sum(self._preparation_s(change) for change in planned)
        free = left - reserved if reserved < left else left  # too little for every preparation: reserve nothing
        return min(_LONGEST_TIMING_S, _TIMING_SHARE * free / (len(planned) + 1))

    def _draw(self, model: nn.Module, seed: int) -> Sample | None:
        if not self._work.prompts:
            return None
        one = wall_us(lambda: model(input_ids=self._work.prompts[0]), self._work.device, calls=1) / 1e6
        allowed = _EVALUATION_SHARE * self._left()
        prompts = min(len(self._work.prompts), max(4, int(allowed / one)))
        if prompts < len(self._work.prompts):
            self.notes.append(
                f"Accuracy is judged on the first {prompts} of {len(self._work.prompts)} prompts, for the time budget."
            )
        config: Any = model.config
        decoded = max(1, int(allowed / self._request_s)) if self._request_s else prompts
        return draw(self._work, int(config.vocab_size), seed=seed, prompts=prompts, decoded=decoded)

    def _evaluate_reference(self, model: nn.Module) -> Evaluation:
        dtype = wide_dtype(model)
        need = sum(p.numel() for p in model.parameters()) * dtype.itemsize + 2 * self._peak
        device = self._work.device if _room(self._work.device) > need else torch.device("cpu")
        if device != self._work.device:
            self.notes.append("The reference ran on the CPU: the device has no room for it besides the model.")
        name = str(dtype).removeprefix("torch.")
        self._say(f"evaluating a {name} copy of the unchanged model as the reference")
        with full_precision():
            reference = evaluate(wide_copy(model, dtype, device), self._work, self._sample, decode=False)
        _release(self._work.device)
        return reference

    def _evaluate_own(self, model: nn.Module, accept_dtype: torch.dtype | None) -> Evaluation:
        """The unchanged model's outputs, or those of it in the accepted dtype; perplexity is always the model's own."""
        began = time.perf_counter()
        unpatched = evaluate(model, self._work, self._sample, decode=True)
        self._evaluation_s = time.perf_counter() - began
        if accept_dtype is None:
            return unpatched
        cast = InDtype(model, (dominant_dtype(model),), accept_dtype)
        try:
            accepted = evaluate(model, self._work, self._sample, decode=True)
        finally:
            cast.undo()
        self.notes.append(f"Errors are held against the unchanged model in {accept_dtype}, as accept_dtype asks.")
        return replace(accepted, nll=unpatched.nll)

    def _copy(self, model: nn.Module) -> Stack:
        if _room(self._work.device) < 1.1 * weight_bytes(model) + 2 * self._peak:
            self.notes.append(
                "The device has no room for a copy: changes were put on and taken off in place, in blocks of rounds."
            )
            return self.main
        return Stack(copy.deepcopy(model), self._work)


def _too_late(needed: float, left: float) -> str:
    if needed:
        rest = f"{max(0.0, left):.0f} s of the budget were left"
        return (
            f"its preparation takes about {needed:.0f} s, and {rest}; a larger budget (--budget, budget_s=) tries it."
        )
    return "the time budget was used up; a larger one (--budget, budget_s=) tries it."


def _room(device: torch.device) -> float:
    """Free bytes on `device`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return float("inf")
    line = next((line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")), None)
    return float("inf") if line is None else float(line.split()[1]) * 1024


def _release(device: torch.device) -> None:
    """Free the memory of a deleted copy now: models have reference cycles, which keep it until the next collection."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
