"""The loop: observe, predict, and then for each change: apply, verify, time, keep or undo.

    opt = optimize(model, input_ids)
    print(opt.report.headline)
    opt.model.generate(...)                  # `model` itself, with the changes that were kept
    opt.undo()                               # `model` as it was before

Changes are tried on a copy. Only those that are kept are applied to the model itself, and the copy, from which all are
taken off, is the baseline of the final timing. If the device has no room for a copy, changes are put on the model
itself and taken off again between blocks of timed rounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.assistant.changes import Budgeted, Change, Scene, TunedOps, chosen
from tilewright.assistant.observation.condense import condense
from tilewright.assistant.observation.observe import Observation, observe
from tilewright.assistant.predict import Roof, roofline, summary
from tilewright.assistant.proposal import propose
from tilewright.assistant.report import ChangeRecord, Kind, Report
from tilewright.assistant.stack import Stack
from tilewright.assistant.steps import Progress, Steps
from tilewright.assistant.timing.threads import choose_threads, restored_threads
from tilewright.assistant.trial import Trials
from tilewright.assistant.workload import Goal, Workload, workload
from tilewright.bench.calibrate import calibrate
from tilewright.bench.commit import commit
from tilewright.bench.machine import clocks, describe
from tilewright.hardware import ceilings as stored
from tilewright.hardware.ceilings import Ceilings

BUDGET_S = 100.0


class Optimization:
    """Result of `optimize`. `model` is the object that was passed in; the changes in `accepted` are in force on it."""

    def __init__(self, model: nn.Module, report: Report, stack: Stack) -> None:
        self.model = model
        self.report = report
        self._stack = stack

    @property
    def accepted(self) -> list[ChangeRecord]:
        """Changes that were kept, in the order in which they were applied."""
        return self.report.decided("kept")

    @property
    def rejected(self) -> list[ChangeRecord]:
        """Changes that were tried and undone."""
        return self.report.decided("rejected")

    @property
    def table(self) -> Path | None:
        """The tuning table of `tuned_ops`, in a folder that goes with the process; None where that was not kept."""
        tables = (change.table for change in self._stack.changes if isinstance(change, TunedOps))
        return next(tables, None)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call `model.generate`, which decodes with a static KV cache if that change was kept."""
        generate: Any = self.model.generate
        return generate(*args, **kwargs)

    @contextmanager
    def taken_off(self) -> Iterator[None]:
        """Take all changes off for the duration of the block, and put them on again afterwards."""
        count = len(self._stack)
        self._stack.at(0)
        try:
            yield
        finally:
            self._stack.at(count)

    def undo(self) -> None:
        """Take every change off: the parameters are those of before, bit for bit, and so is the state_dict."""
        self._stack.at(0)


def optimize(
    model: nn.Module,
    inputs: Any = None,
    *,
    goal: Goal = "latency",
    prompts: Sequence[str | Tensor] | None = None,
    tokenizer: Any = None,
    allow: Sequence[str] | None = None,
    changes: Sequence[Change] | None = None,
    new_tokens: int = 32,
    batch_size: int = 8,
    accept_dtype: torch.dtype | None = None,
    budget_s: float | None = None,
    seed: int = 0,
    ceilings: Ceilings | None = None,
    progress: Progress | None = None,
) -> Optimization:
    """Make `model` faster on `inputs`, keeping only what is measured faster and verified accurate.

    inputs: a tensor, tuple or mapping for one forward call, or a list of those; None takes a prompt of median length.
    goal: "latency" times one request (prefill and `new_tokens` greedy tokens), "throughput" `batch_size` of them at
    once.
    prompts: strings (with `tokenizer`) or token ids: accuracy and perplexity are judged on them, else on `inputs`.
    allow: names of changes to try; None tries all. changes: Change objects to try instead of the catalogue.
    accept_dtype: a dtype whose rounding you accept: errors are compared with those of the unchanged model cast to it.
    budget_s: seconds of wall time to aim at, 100 by default, divided among the changes that are still to be tried. A
    compilation is not begun when too little time is left, and is never interrupted.
    seed: of the positions in the prompts at which accuracy is judged.
    ceilings: the result of `tilewright calibrate`; None loads the stored one, or measures a quick set first.
    progress: called with one line of text at each step.

    A module that is no language model is timed on its forward call alone. Raises InputError for inputs it cannot use.
    On any error, an interrupt included, the model is restored.
    """
    say = Steps(progress)
    journal = _Journal()
    budget = BUDGET_S if budget_s is None else budget_s
    deadline = time.perf_counter() + budget
    with restored_threads():
        with journal.stage("observe"):
            work = workload(
                model,
                inputs,
                goal=goal,
                prompts=prompts,
                tokenizer=tokenizer,
                new_tokens=new_tokens,
                batch_size=batch_size,
            )
            threads = choose_threads(model, work, budget_s=budget)
            scene = _scene(model, work, ceilings, journal, say)
        candidates = chosen(allow) if changes is None else changes
        records, proposals = propose(scene, [c.within(budget) if isinstance(c, Budgeted) else c for c in candidates])
        stack = Stack(model, work)
        say.plan(len(proposals) + 2)
        try:
            say.next()
            with journal.stage("reference and control"):
                trials = Trials(scene, stack, seed=seed, accept_dtype=accept_dtype, deadline=deadline, say=say)
                trials.take_control()
            while proposals:
                say.next()
                item, *later = trials.in_order(proposals)
                proposals = [other for other in proposals if other is not item]
                with journal.stage(item.change.name):
                    planned = [other.change for other in later]
                    records.append(trials.attempt(item.change, trials.predict_now(item), planned=planned))
            say.next()
            with journal.stage("final measurement"):
                totals, accuracy = trials.finish()
                after = observe(model, work, say, count_costs=False) if totals is not None else None
        except BaseException:
            stack.at(0)
            raise
        report = _report("optimize", scene, records, journal)
    report.control, report.totals, report.accuracy = trials.control, totals, accuracy
    report.notes += [threads.note] * bool(threads.note) + trials.notes
    report.after = condense(after) if after is not None else None
    return Optimization(model, report, stack)


def analyze(
    model: nn.Module,
    inputs: Any = None,
    *,
    goal: Goal = "latency",
    prompts: Sequence[str | Tensor] | None = None,
    tokenizer: Any = None,
    allow: Sequence[str] | None = None,
    changes: Sequence[Change] | None = None,
    new_tokens: int = 32,
    batch_size: int = 8,
    ceilings: Ceilings | None = None,
    progress: Progress | None = None,
) -> Report:
    """Observe `model` and change nothing: where its time goes, how far that is from this machine's ceilings, and which
    changes are worth trying. The arguments are those of `optimize`.
    """
    say = Steps(progress)
    journal = _Journal()
    with journal.stage("observe"):
        work = workload(
            model, inputs, goal=goal, prompts=prompts, tokenizer=tokenizer, new_tokens=new_tokens, batch_size=batch_size
        )
        scene = _scene(model, work, ceilings, journal, say)
    records, proposals = propose(scene, chosen(allow) if changes is None else changes)
    records += [ChangeRecord.of(item.change, "proposed", item.reason, item.predicted) for item in proposals]
    return _report("analyze", scene, records, journal)


def _scene(model: nn.Module, work: Workload, ceilings: Ceilings | None, journal: _Journal, say: Progress) -> Scene:
    journal.clocks = clocks(work.device)
    limits = ceilings or stored.load(work.device)
    if limits is None:
        say("no ceilings are known for this machine: measuring a quick set")
        limits = calibrate(work.device, quick=True, progress=say)
    observation = observe(model, work, say)
    if ceilings is None and _doubts(roofline(observation, limits), observation):
        say("the model is faster than its floors: measuring the ceilings again")
        limits = calibrate(work.device, quick=True, progress=say)
    return Scene(model, work, observation, limits)


def _report(kind: Kind, scene: Scene, records: list[ChangeRecord], journal: _Journal) -> Report:
    work, observation = scene.work, scene.observation
    roofs = roofline(observation, scene.ceilings)
    return Report(
        kind=kind,
        goal=work.goal,
        machine=describe(
            work.device, before=journal.clocks, after=clocks(work.device), ceilings=summary(scene.ceilings)
        ).to_dict(),
        model={
            "class": type(scene.model).__name__,
            "device": str(work.device),
            "dtype": observation.dtype,
            "parameters": observation.parameters,
            "weight_bytes": observation.weight_bytes,
        },
        workload={
            "examples": len(work.examples),
            "example_shape": list(work.input_ids.shape) if work.generates else None,
            "prompts": len(work.prompts) if work.held_out else 0,
            "new_tokens": work.new_tokens,
        },
        before=condense(observation),
        roofs=roofs,
        changes=records,
        seconds=journal.seconds,
        notes=_doubts(roofs, observation),
        commit=commit(),
    )


def _doubts(roofs: list[Roof], observation: Observation) -> list[str]:
    """A sentence for each phase that is faster than its floor: there the ceilings must be too low."""
    doubts = []
    for phase in observation.phases:
        floor = sum(roof.floor_us for roof in roofs if roof.phase == phase.name)
        if floor > 1.1 * phase.wall_us:
            doubts.append(
                f"The {phase.name} took {phase.wall_us / 1e3:.3g} ms, less than its floor of {floor / 1e3:.3g} ms: "
                "the machine was busy when its ceilings were measured. `tilewright calibrate` measures them again."
            )
    return doubts


class _Journal:
    """Seconds of each stage, and the device's clock rates at the start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.clocks: dict[str, float] | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - began, 3)
