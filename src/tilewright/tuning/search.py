"""The race for one problem: compile and check candidates while the budget lasts, then time those that are right.

Timing is interleaved in one process, in groups that hold the present choice, so that ratios to it can be compared
across groups.  A short first look leaves the few that come near the best; these are timed once more, longer.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.bench.statistics import Ratio, Samples, paired_ratio
from tilewright.errors import BackendError
from tilewright.tuning.compiling import Compilers
from tilewright.tuning.problem import Problem
from tilewright.tuning.space import Space, Trial
from tilewright.tuning.watched import Watched, WorkerFailed, WorkerLost

PREPARE_S = 300.0  # inputs and oracle of the largest workloads, on a busy machine
GROUP = 8  # candidates timed together: each holds its own outputs
FINALISTS = 6
NEAR = 1.08  # the first look is off by a few percent
TRYING = 0.75  # share of the budget for compiling and checking
NO_TIME = "not tried: the budget was used up"

Progress = Callable[[str, int, int], None]
"""(current step, count, total)."""
Timed = Callable[[Sequence[Trial], int], dict[Trial, Samples]]
"""(trials, rounds) -> interleaved samples of those that could be timed; the others have a reason from then on."""


@dataclass(frozen=True)
class Effort:
    """Rounds of the first look and of the last, and limits in seconds: for any step of one candidate, and for making
    the inputs and the oracle.
    """

    look: int
    rounds: int
    seconds: float
    prepare: float = PREPARE_S


@dataclass(frozen=True)
class Race:
    """The result of a race.   best: the fastest.   ratio: present / best, round by round; None if present was dropped.

    samples: those of the last look, with the present choice, each backend's best and torch among them.
    """

    best: Trial
    ratio: Ratio | None
    samples: dict[Trial, Samples]


class Track:
    """One problem and its workers: `compilers` compile all candidates, one `bench` worker has the device."""

    def __init__(self, problem: Problem, compilers: Compilers, bench: Watched, effort: Effort) -> None:
        self._problem, self._compilers, self._bench, self._effort = problem, compilers, bench, effort
        self._prepared: int | None = None

    def race(self, space: Space, deadline: float, progress: Progress) -> Race:
        """Find the fastest correct candidate before `deadline` (in time.monotonic).

        Raises BackendError if none is correct.
        """
        trials = space.trials
        trial_deadline = time.monotonic() + TRYING * (deadline - time.monotonic())
        self._try(trials, len(space.first), trial_deadline, progress)
        if space.present.backend == "torch" and self._problem.direction == "bwd":
            space.present.reason = "torch's backward is autograd's: no row can ask for it"
        progress("timing", 0, 2)
        correct = self._in_race(trials)
        look(correct, space.present, self._effort.look, self._timed)
        progress("timing", 1, 2)
        chosen = finalists(self._in_race(correct), space.present)
        samples = self._timed(chosen, self._effort.rounds)
        progress("timing", 2, 2)
        best = min(self._in_race(chosen), key=lambda trial: samples[trial].median)
        ratio = paired_ratio(samples[space.present], samples[best]) if space.present in samples else None
        return Race(best, ratio, samples)

    def torch(self) -> Samples | None:
        """Times of torch's own forward or backward on this problem; None where it cannot be timed."""
        try:
            (times,) = self._ask("time", [("torch", None)], self._effort.rounds)
        except WorkerFailed as error:
            times = str(error)
        return None if isinstance(times, str) else Samples(times)

    def _try(self, trials: Sequence[Trial], always: int, deadline: float, progress: Progress) -> None:
        """Compile and check, in batches of twice the pool; the first `always` even when the time is up."""
        tried = 0
        for batch in _batches(trials, max(always, 2 * self._compilers.jobs), 2 * self._compilers.jobs):
            compiled = 0

            def advance() -> None:
                nonlocal compiled
                compiled += 1
                progress("compiling", tried + compiled, len(trials))  # noqa: B023 - called before the next batch

            if tried and time.monotonic() > deadline:
                for trial in batch:
                    trial.reason = NO_TIME
                continue
            self._compilers.compile(self._problem, batch, advance)
            for trial in batch:
                tried += 1
                if trial.reason is None and tried > always and time.monotonic() > deadline:
                    trial.reason = NO_TIME
                if trial.reason is None:
                    trial.reason = self._check(trial)
                progress("checking", tried, len(trials))

    def _check(self, trial: Trial) -> str | None:
        """Why a candidate is dropped, or None.  A crash in a used worker is retried: another may have caused it."""
        generation = self._bench.generation if self._bench.alive else None
        try:
            reason: str | None = self._ask("check", *trial.choice)
        except WorkerFailed as error:
            if isinstance(error, WorkerLost) and not error.hung and self._prepared == generation:
                return self._check(trial)
            return str(error)
        return reason

    def _timed(self, trials: Sequence[Trial], rounds: int) -> dict[Trial, Samples]:
        """Interleaved samples; a trial that cannot be timed gets its reason and has none."""
        racing = [trial for trial in trials if trial.reason is None]
        while racing:
            try:
                answers = self._ask("time", [trial.choice for trial in racing], rounds)
            except WorkerFailed:
                culprit, reason = self._culprit(racing)
                culprit.reason = f"{reason} (while it was timed)"
                racing.remove(culprit)
                continue
            timed = {}
            for trial, answer in zip(racing, answers, strict=True):
                if isinstance(answer, str):
                    trial.reason = answer
                else:
                    timed[trial] = Samples(answer)
                    trial.us = timed[trial].median
            return timed
        return {}

    def _culprit(self, trials: Sequence[Trial]) -> tuple[Trial, str]:
        """Find the trial that takes the worker down, by bisection, and how it does."""
        while len(trials) > 1:
            half = trials[: len(trials) // 2]
            try:
                self._ask("time", [trial.choice for trial in half], 1)
            except WorkerFailed:
                trials = half
            else:
                trials = trials[len(half) :]
        try:
            self._ask("time", [trials[0].choice], self._effort.rounds)
        except WorkerFailed as error:
            return trials[0], str(error)
        return trials[0], "crashed: only beside others"

    def _in_race(self, trials: Sequence[Trial]) -> list[Trial]:
        racing = [trial for trial in trials if trial.reason is None]
        if not racing:
            reasons = "; ".join(f"{trial}: {trial.reason}" for trial in trials[:3])
            raise BackendError(f"{self._problem.op}: no candidate is right here ({reasons})")
        return racing

    def _ask(self, request: str, *arguments: Any) -> Any:
        """Send a request to the worker that has the device; a new worker is first sent the problem."""
        if not self._bench.alive or self._prepared != self._bench.generation:
            try:
                self._bench.ask("prepare", self._problem, timeout=self._effort.prepare)
            except WorkerFailed as error:
                raise BackendError(f"{self._problem.op}: its inputs cannot be made: {error}") from None
            self._prepared = self._bench.generation
        seconds = self._effort.seconds * (len(arguments[0]) if isinstance(arguments[0], list) else 1)
        return self._bench.ask(request, *arguments, timeout=seconds)


def _batches(trials: Sequence[Trial], first: int, size: int) -> Iterator[list[Trial]]:
    """Split trials into a first batch of size `first` and others of size `size`."""
    yield list(trials[:first])
    for start in range(first, len(trials), size):
        yield list(trials[start : start + size])


def look(trials: Sequence[Trial], present: Trial, rounds: int, timed: Timed) -> None:
    """Time each roughly; the present choice in every group makes groups comparable."""
    others = [trial for trial in trials if trial is not present]
    reference: float | None = None
    for group in _batches(others, GROUP, GROUP):
        shared = [present, *group] if present.reason is None else group
        samples = timed(shared, rounds)
        base = samples[present].median if present in samples else None
        reference = reference or base
        scale = reference / base if reference and base else 1.0
        for trial, times in samples.items():
            trial.us = times.median * scale
    if not others:
        for trial, times in timed(list(trials), rounds).items():
            trial.us = times.median


def finalists(trials: Sequence[Trial], present: Trial) -> list[Trial]:
    """The present choice, the best of each backend, and those near the best of all."""
    ranked = sorted(trials, key=lambda trial: trial.us or 0.0)
    contenders = [trial for trial in ranked if (trial.us or 0.0) <= NEAR * (ranked[0].us or 0.0)]
    leaders = {trial.backend: trial for trial in reversed(ranked)}
    chosen = [*leaders.values(), *contenders[:FINALISTS], *([present] if present in trials else [])]
    return list(dict.fromkeys(chosen))
