"""Try the configurations of one call: each is checked against the first, then timed with the bench's clocks.

All of it happens on copies of the arguments, in this process.  The user's own tensors are read once, to copy them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import BoundArguments
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.bench.graph import capture, interleave_replays
from tilewright.bench.pacing import MAX_LAUNCHES, launch_sized
from tilewright.bench.rotation import rotate, sets_for
from tilewright.bench.statistics import Samples, paired_ratio
from tilewright.bench.timing import interleave
from tilewright.errors import BackendError, InputError
from tilewright.log import logger
from tilewright.tuning.own_kernels.agreement import difference
from tilewright.tuning.own_kernels.arguments import bytes_of, copied, shares_memory, tensors_in
from tilewright.tuning.own_kernels.space import Config
from tilewright.tuning.search import finalists, look
from tilewright.tuning.space import Trial
from tilewright.validate.bits import same_bits

USER = "user"
"""The backend of a user's own kernels in a table."""
_LOOK, _ROUNDS = {"cuda": 7, "cpu": 5}, {"cuda": 25, "cpu": 15}

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Outcome(NamedTuple):
    """The fastest right configuration, with its times, and all that were tried."""

    best: Trial
    samples: Samples
    trials: tuple[Trial, ...]


class Launches:
    """One call of a user's launch function, with copies of its arguments to make it again on.

    restore: names of the arguments that a launch writes.   tolerance: see `agreement`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        call: BoundArguments,
        restore: Sequence[str],
        device: torch.device,
        tolerance: float | None,
    ) -> None:
        self._function, self._call, self._restore, self._device = function, call, restore, device
        self._tolerance = tolerance
        arguments = call.arguments
        for name in restore:
            if not tensors_in(arguments.get(name)) and arguments.get(name) is not None:
                raise InputError(f"{function.__qualname__}: restore names {name}, which is no tensor.")
        total = bytes_of(arguments)
        self._sets = [copied(dict(arguments)) for _ in range(sets_for(total, device, at_most=MAX_LAUNCHES))]
        self._before = [t.clone() for t in self._written(self._sets[0])]
        self._launches = MAX_LAUNCHES if launch_sized(total, device) else None
        self._standard: list[Tensor] | None = None

    def check(self, config: Config) -> str | None:
        """Why a configuration is out, in words, or None.  The first that runs is what the others are compared with."""
        arguments = self._sets[0]
        self._reset(arguments)
        try:
            result = self._run(config, arguments)
            self._synchronize()
        except Exception as error:  # noqa: BLE001 - whatever a configuration raises is its result
            self._require_device(config)
            return _short(error)
        changed = self._changed(arguments)
        if changed is not None:
            return f"writes to {changed}, which restore= does not name"
        results = [*tensors_in(result), *self._written(arguments)]
        if not results:
            raise InputError(
                f"{self._function.__qualname__}: nothing to compare configurations by. Name the tensors that it writes "
                'in restore=("out",), or return them.'
            )
        if self._standard is None:
            self._standard = [t.clone() for t in results]
            return None
        return difference(self._standard, results, self._tolerance)

    def timed(self, trials: Sequence[Trial], rounds: int) -> dict[Trial, Samples]:
        """Interleaved samples of trials that passed their check: device time on a GPU, wall time on a CPU."""
        calls = {
            str(i): rotate([partial(self._run, trial.config, each) for each in self._sets])
            for i, trial in enumerate(trials)
        }
        for arguments in self._sets:
            self._reset(arguments)
        samples = self._replayed(calls, rounds) if self._launches else None
        if samples is None:
            samples = interleave(calls, device=self._device, rounds=rounds)
        return {trial: samples[str(i)] for i, trial in enumerate(trials)}

    def _replayed(self, calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, Samples] | None:
        """Samples of CUDA graphs; None where the function cannot be captured."""
        assert self._launches is not None
        capture_one = partial(capture, launches=self._launches, device=self._device, error_mode="thread_local")
        try:
            replays = {name: capture_one(call) for name, call in calls.items()}
        except RuntimeError as error:
            logger.info("%s is timed without CUDA graphs: %s", self._function.__qualname__, _short(error))
            self._launches = None
            return None
        return interleave_replays(replays, device=self._device, launches=self._launches, rounds=rounds)

    def _run(self, config: Config, arguments: dict[str, Any]) -> Any:
        call = BoundArguments(self._call.signature, arguments)
        with torch.no_grad():
            return self._function(*call.args, **call.kwargs, **config)

    def _written(self, arguments: dict[str, Any]) -> list[Tensor]:
        return [t for name in self._restore for t in tensors_in(arguments.get(name))]

    def _reset(self, arguments: dict[str, Any]) -> None:
        with torch.no_grad():
            for t, before in zip(self._written(arguments), self._before, strict=True):
                t.copy_(before)

    def _changed(self, arguments: dict[str, Any]) -> str | None:
        """An argument that a launch has written, although `restore` does not name it."""
        written = self._written(arguments)
        for name, value in arguments.items():
            pairs = zip(tensors_in(value), tensors_in(self._call.arguments[name]), strict=True)
            for ours, users in pairs:
                if not shares_memory(ours, written) and not same_bits(ours, users):
                    return name
        return None

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _require_device(self, config: Config) -> None:
        """Raise BackendError where a configuration took the device down: an illegal access ends its context."""
        try:
            self._synchronize()
        except RuntimeError as error:
            raise BackendError(
                f"{self._function.__qualname__}: {Trial(USER, config)} took the GPU down ({_short(error)}). "
                "Keep it out with constraint=."
            ) from error


def race(launches: Launches, configs: Sequence[Config], device: torch.device) -> Outcome:
    """The fastest of the configurations that are right; the first of them unless another is faster beyond the noise.

    Raises BackendError, with the reason of each, where none is right.
    """
    trials = tuple(Trial(USER, config, default=not i) for i, config in enumerate(configs))
    for trial in trials:
        trial.reason = launches.check(trial.config)
    present = next((trial for trial in trials if trial.reason is None), None)
    if present is None:
        raise BackendError(f"no configuration runs:\n{failures(trials)}")
    look([trial for trial in trials if trial.reason is None], present, _LOOK[device.type], launches.timed)
    samples = launches.timed(
        finalists([trial for trial in trials if trial.reason is None], present), _ROUNDS[device.type]
    )
    for best in sorted(samples, key=lambda trial: samples[trial].median):
        if best is not present and paired_ratio(samples[present], samples[best]).low <= 1:
            break
        fault = launches.check(best.config)
        if fault is None:
            return Outcome(best, samples[best], trials)
        best.reason = f"after timing: {fault}"
    if present.reason is not None:
        raise BackendError(f"no configuration is right twice:\n{failures(trials)}")
    return Outcome(present, samples[present], trials)


def failures(trials: Sequence[Trial]) -> str:
    """A line for each that was dropped, with the reason."""
    lines = (f"  {describe(trial.config)}: {trial.reason}" for trial in trials if trial.reason is not None)
    return "\n".join(lines)


def describe(config: Config) -> str:
    """A configuration in one line."""
    return " ".join(f"{name}={value}" for name, value in config.items())


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
