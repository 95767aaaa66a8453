"""Compile candidates in parallel before any of them is launched: one that spills or does not compile never runs."""

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

import torch

from tilewright.dispatch import implementations
from tilewright.hardware import arch
from tilewright.jit.collect import Collector, collect
from tilewright.log import logger
from tilewright.tuning.problem import Problem, fake_call
from tilewright.tuning.space import Trial
from tilewright.tuning.watched import Watched, WorkerFailed


class Compilers:
    """A pool of watched workers without a GPU.   seconds: limit for one candidate."""

    def __init__(self, jobs: int, architecture: str, seconds: float) -> None:
        environment = {"CUDA_VISIBLE_DEVICES": "", "TILEWRIGHT_ARCH": architecture, "OMP_NUM_THREADS": "1"}
        if architecture == "cpu":
            del environment["TILEWRIGHT_ARCH"]
        self._workers = [Watched(environment) for _ in range(jobs)]
        self._seconds = seconds

    @property
    def jobs(self) -> int:
        """Compilations at once."""
        return len(self._workers)

    def compile(self, problem: Problem, trials: Sequence[Trial], advance: Callable[[], None]) -> None:
        """Compile all; those that may not run get their reason.  `advance` is called after each."""
        waiting, busy = list(trials), dict[Watched, Trial]()
        while waiting or busy:
            for worker in self._workers:
                if waiting and worker not in busy:
                    trial = waiting.pop(0)
                    worker.send("compile", problem, *trial.choice, trial.default, timeout=self._seconds)
                    busy[worker] = trial
            soonest = min(worker.deadline for worker in busy)
            wait([worker.connection for worker in busy], max(0.0, soonest - time.monotonic()))
            for worker in [worker for worker in busy if worker.settled()]:
                trial = busy.pop(worker)
                try:
                    trial.reason = worker.answer()
                except WorkerFailed as error:
                    trial.reason = f"{error} (while it was compiled)"
                advance()

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.close()


def compile_candidate(problem: Problem, backend: str, config: Any, default: bool) -> str | None:
    """Compile every kernel the candidate would launch, in a worker.  Returns why it may not run, or None.

    A default may spill: it runs where nothing is tuned, so it must be timed.
    A kernel that cannot be compiled ahead of a launch is left to the check.
    """
    gpu = torch.device(problem.device).type == "cuda"
    with fake_call(problem, meta=gpu) as call:
        raw, args = call
        implementation = implementations(raw.op, raw.direction).get(backend)
        if implementation is None:  # torch
            return None
        with collect(arch(problem.device)) as collector:
            try:
                implementation.launch(raw.allocate(args, raw.device_of(args)), *args, config=config)
            except Exception as error:  # noqa: BLE001 - a launch that reads data fails on these tensors, and may
                logger.debug("%s %s: not compiled ahead: %s", backend, config, error)
                return None
    return _compile_jobs(collector, default)


def _compile_jobs(collector: Collector, may_spill: bool) -> str | None:
    for job in collector.jobs:
        try:
            spilled = job.compile().info.get("spills")
        except Exception as error:  # noqa: BLE001 - compilers raise whatever they like, and it is the result
            lines = str(error).strip().splitlines() or [""]
            return f"does not compile: {job.name}: {type(error).__name__}: {lines[0]}"[:300]
        if spilled and not may_spill:
            return f"spills: {job.name}, {spilled}"
    return None
