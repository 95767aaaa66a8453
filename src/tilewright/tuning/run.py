"""`tune`: every case of a suite or op, one after the other, into one table."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilewright.bench import machine
from tilewright.bench.cases import Case, known_contracts, select, suites
from tilewright.bench.tables import header, users_table
from tilewright.dispatch.backends import check_name, missing
from tilewright.dispatch.contract import Direction
from tilewright.dispatch.tables import table
from tilewright.dispatch.tables.staleness import changes
from tilewright.dispatch.tables.update import update
from tilewright.errors import BackendError, InputError, UsageError
from tilewright.hardware import arch
from tilewright.settings import current
from tilewright.tuning.compiling import Compilers
from tilewright.tuning.decide import decide
from tilewright.tuning.exclusive import exclusive
from tilewright.tuning.problem import Problem, bucket_of, modules_of
from tilewright.tuning.report import Report, Untuned
from tilewright.tuning.search import PREPARE_S, Effort, Track
from tilewright.tuning.space import Search, space
from tilewright.tuning.watched import Watched, WorkerFailed

FOREVER = 1e9  # seconds: no budget

Progress = Callable[[int, int, Case, str, int, int], None]
"""(number of the case, cases, the case, current step, count, total)."""


def tune(
    suite: str,
    *,
    case: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    direction: Direction | None = None,
    backend: str | None = None,
    device: torch.device | str | None = None,
    search: Search = "exhaustive",
    budget: float | None = None,
    min_gain: float = 0.03,
    path: Path | None = None,
    seconds: float = 60.0,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Find the fastest choice for every declared workload of `suite`, and write changed rows into a table.

    suite      an op, an op family ("norm", "softmax", ...) or "all"
    case       only workloads with these sizes; if none has them, these sizes.   dtype, direction, backend: only these
    search     "exhaustive", or "random": the space in random order, for a budget that does not reach its end
    budget     seconds for the whole run; each case gets its share, and the present choice is always timed
    min_gain   a row changes only for a choice faster than the present one by more than this and by more than the noise
    path       the table to write; default: the user's own for this device
    seconds    limit for compiling, checking or timing one candidate
    seed       seed of the random inputs; default: a fresh one

    Everything runs in the tuner's own processes, on its own tensors.  A second tuner of the same op on a device of the
    same name waits.  Raises InputError inside a CUDA graph capture, UsageError for unknown names, BackendError for a
    backend that cannot run on the device.
    """
    target = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    refuse_here(target, backend)
    cases = _cases(suite, case, dtype, direction, target)
    run = Run(target, search, backend, min_gain, path, seconds, seed)
    return run.all([Job(each, problem_of(each, target, run.report.seed)) for each in cases], budget, progress)


def refuse_here(device: torch.device, backend: str | None) -> None:
    """Raise InputError inside a CUDA graph capture, BackendError for a backend that cannot run on the device."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise InputError("tune: a CUDA graph is being captured. Tune before, or after.")
    if backend is not None and (reason := missing(check_name(backend), device.type)):
        raise BackendError(f"tune: backend {backend} {reason}.")


class Job(NamedTuple):
    """A case, its problem, and its part of the budget beside those of the others."""

    case: Case
    problem: Problem
    weight: float = 1.0


class Run:
    """State that the cases of one run share: the device, workers, the table, the report.  Arguments as in `tune`."""

    def __init__(
        self,
        device: torch.device,
        search: Search = "exhaustive",
        backend: str | None = None,
        min_gain: float = 0.03,
        path: Path | None = None,
        seconds: float = 60.0,
        seed: int | None = None,
        prepare: float = PREPARE_S,
    ) -> None:
        self.device, self._search, self._backend, self._min_gain = device, search, backend, min_gain
        self._machine = machine.describe(device).to_dict()
        target = path or users_table(self._machine["device"])
        if target.is_file():
            table.read(target)  # rows are merged into it: raise now if the file is no table
        seed = secrets.randbelow(2**31) if seed is None else seed
        self.report = Report(self._machine["device"], seed, target)
        gpu = device.type == "cuda"
        self._effort = Effort(look=7 if gpu else 5, rounds=25 if gpu else 15, seconds=seconds, prepare=prepare)
        self._compilers, self._bench = Compilers(current().max_jobs, arch(device), seconds), Watched()

    def all(self, jobs: Sequence[Job], budget: float | None, progress: Progress | None) -> Report:
        """Tune every job within `budget` seconds, each with its part of what is left; the workers end."""
        end = time.monotonic() + (FOREVER if budget is None else budget)
        try:
            for i, job in enumerate(jobs):
                now = time.monotonic()
                if i and now >= end:
                    self.leave(job.case, "the budget was used up")
                    continue

                def say(what: str, count: int, total: int, number: int = i, running: Case = job.case) -> None:
                    if progress is not None:
                        progress(number, len(jobs), running, what, count, total)

                part = job.weight / sum(later.weight for later in jobs[i:])
                self.tune(job.case, job.problem, now + (end - now) * part, say)
        finally:
            self.close()
        return self.report

    def close(self) -> None:
        """End the workers."""
        self._compilers.close()
        self._bench.close()

    def leave(self, case: Case, reason: str, *, failed: bool = False) -> None:
        """Record a case that was not tuned."""
        self.report.untuned.append(Untuned(*case.key, reason, failed))

    def is_fresh(self, key: tuple[str, ...]) -> bool:
        """True if the table has a row with this key, of this machine and of the versions that run now."""
        row = self._row(key)
        return row is not None and row.gpu == self._machine["device"] and not changes(row, self.device.type)

    def tune(self, case: Case, problem: Problem, deadline: float, say: Callable[[str, int, int], None]) -> None:
        """Tune one case, under a lock that machines with this cache folder share."""
        subject = case.contract
        search_space = space(problem, self._search, self._backend)
        key = (subject.name, case.direction, search_space.bucket, search_space.dtype, "default")
        before = self._row(key)
        say("waiting for another tuner", 0, 1)
        with exclusive(f"{self._machine['device']} {subject.name}") as waited:
            if waited:
                table.forget()
                search_space = space(problem, self._search, self._backend)
                if self._row(key) != before:
                    self.leave(case, "another process has just tuned it")
                    return
            if all(trial.backend == "torch" for trial in search_space.trials):
                self.leave(case, "torch alone can run it")
                return
            began = time.monotonic()
            track = Track(problem, self._compilers, self._bench, self._effort)
            try:
                race = track.race(search_space, deadline, say)
                torchs = next((s for t, s in race.samples.items() if t.backend == "torch"), None) or track.torch()
            except (BackendError, WorkerFailed) as error:
                self.leave(case, str(error), failed=True)
                return
            tuned = decide(case, search_space, race, torchs, self._min_gain, time.monotonic() - began)
            if tuned.changed or not self.is_fresh(key):
                update(self.report.table, header(self._machine), [tuned.row])
            self.report.tuned.append(tuned)

    def _row(self, key: tuple[str, ...]) -> table.Row | None:
        """The row with this key in the table that this run writes."""
        file = table.file_of(self.report.table, key[0])
        return next((row for row in table.read(file)[1] if row.key == key), None) if file.exists() else None


def _cases(
    suite: str, case: Mapping[str, Any] | None, dtype: str | None, direction: Direction | None, device: torch.device
) -> list[Case]:
    """Cases of an op, a family or all; of several that share a table row, the first."""
    by_name = known_contracts()
    if suite not in by_name and suite not in suites():
        raise UsageError(f"no op or suite named {suite!r}. Ops: {', '.join(by_name)}. Suites: {', '.join(suites())}.")
    family, ops = (by_name[suite].family, [suite]) if suite in by_name and suite not in suites() else (suite, None)
    unique: dict[tuple[Any, ...], Case] = {}
    for each in select(family, ops=ops, dtype=dtype, case=case, device=device):
        if direction in (None, each.direction):
            unique.setdefault(
                (each.contract.name, each.direction, each.dtype, bucket_of(problem_of(each, device, 0))), each
            )
    return list(unique.values())


def problem_of(case: Case, device: torch.device, seed: int) -> Problem:
    """The problem of a case with declared sizes, as a worker rebuilds it."""
    workload, modules = case.workload, modules_of(case.contract, device.type)
    inference = "bwd" not in workload.directions
    return Problem(
        case.contract.name, case.direction, workload.params, case.dtype, str(device), seed, modules, inference
    )
