"""`@tilewright.tune`: a launch function that finds its own configuration at the first call of a key."""

import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import update_wrapper
from inspect import Parameter, Signature, signature
from operator import index
from pathlib import Path
from threading import RLock
from types import MethodType
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch

from tilewright.bench import machine
from tilewright.bench.tables import header, users_table
from tilewright.dispatch.preference import current_numerics
from tilewright.dispatch.tables import table, update
from tilewright.dispatch.tables.measured import why_not_measured
from tilewright.errors import BackendError, InputError, TableError
from tilewright.generation import GENERATION
from tilewright.hardware import device_info
from tilewright.log import log_once, logger
from tilewright.tuning.decide import digits
from tilewright.tuning.exclusive import exclusive
from tilewright.tuning.own_kernels.arguments import Kind, device_of, dtypes_text, kinds, tensors_in
from tilewright.tuning.own_kernels.space import Config, Constraint, Sizes, Space, declare, equal, sizes_of, text
from tilewright.tuning.own_kernels.trials import USER, Launches, Outcome, describe, failures, race

R = TypeVar("R")
Key = Callable[..., Mapping[str, int | str]]

_measuring = RLock()  # one at a time: two would disturb each other's times.  A launch may call another tuned one
_by_handle: "WeakValueDictionary[str, TunedLaunch[Any]]" = WeakValueDictionary()


class Choice(NamedTuple):
    """The configuration of a call, and where it comes from."""

    config: Config
    why: str


class _Problem(NamedTuple):
    """One key of a launch function: a row of its table."""

    bucket: str
    dtype: str
    device: torch.device
    configs: tuple[Config, ...]


def tune(
    *,
    space: Mapping[str, Sequence[Any]],
    key: Key,
    restore: Sequence[str] = (),
    constraint: Constraint | None = None,
    default: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    name: str | None = None,
) -> "Callable[[Callable[..., R]], TunedLaunch[R]]":
    """Decorate a function that launches a kernel of your own, and that takes the parameters in `space` as keywords.

        @tilewright.tune(
            space={"BLOCK": (256, 1024), "num_warps": (4, 8)},
            key=lambda x, out: {"M": x.shape[0], "N": x.shape[1]},
            restore=("out",),
        )
        def softmax_rows(x, out, *, BLOCK, num_warps):
            kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=BLOCK, num_warps=num_warps)

        softmax_rows(x, out)    # the first call of (M, N), dtypes and GPU measures; the others do not

    space        the values of each parameter, ints, floats, strings, bools or None; every combination is tried
    key          (*args, **kwargs) of a call -> sizes that the choice depends on, ints and strings; round them where
                 many occur
    restore      names of the tensors that a launch writes
    constraint   (key, config) -> does this configuration fit?
    default      what runs where nothing may be measured; by default the first value of each parameter
    tolerance    by how much a result may differ from that of the default, relative to its row; by default by dtype:
                 float64 1e-10, float32 1e-4, float16 2^-9, bfloat16 2^-6
    name         of the kernel in tables; by default the function's module and name.  Another kernel needs another one

    Configurations are tried on copies of the arguments.  One that raises, or whose result is not the default's, is
    dropped with its reason.  The winner is written into the user's table.  Inside a CUDA graph capture, under tracing
    and under `numerics` other than "default" nothing is measured.  Raises InputError for an empty space and for keys
    that no table can hold, BackendError where no configuration runs.
    """

    def decorate(function: Callable[..., R]) -> TunedLaunch[R]:
        label = name if name is not None else _name_of(function)
        if not re.fullmatch(r"[\w.-]+", label):
            raise InputError(f"tune: the name {label!r} is to be a file's; use letters, digits, '_', '.' and '-'.")
        choices = declare(label, space, default)
        return TunedLaunch(function, label, choices, key, tuple(restore), constraint, tolerance)

    return decorate


class TunedLaunch(Generic[R]):
    """A launch function that `tune` decorated; `__wrapped__` is the function itself."""

    __wrapped__: Callable[..., R]

    def __init__(
        self,
        function: Callable[..., R],
        name: str,
        space: Space,
        key: Key,
        restore: tuple[str, ...],
        constraint: Constraint | None,
        tolerance: float | None,
    ) -> None:
        update_wrapper(self, function)
        self.name = name
        self._function, self._space, self._key = function, space, key
        self._restore, self._constraint, self._tolerance = restore, constraint, tolerance
        self._signature = _without(signature(function), name, space.names, restore)
        self._names = [p.name for p in self._signature.parameters.values() if p.kind is not Parameter.KEYWORD_ONLY]
        self._chosen: dict[tuple[Any, ...], tuple[int, Config]] = {}
        self._measured: dict[tuple[str, ...], Choice] = {}  # also what could not be written
        self._handle = str(id(self))  # a string: under `torch.compile` an int of an object may become a symbol
        _by_handle[self._handle] = self

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Launch in the configuration of this key; measure it first where no table has it."""
        if torch.compiler.is_compiling():
            values = _constant_values(self._handle, _static(self._key(*args, **kwargs)), self._kinds(args, kwargs))
            return self._function(*args, **kwargs, **dict(zip(self._space.names, values, strict=True)))
        sizes, of_call = sizes_of(self.name, self._key(*args, **kwargs)), self._kinds(args, kwargs)
        ident = (current_numerics(), sizes, *of_call)
        generation, config = self._chosen.get(ident, (-1, None))
        if config is None or generation != GENERATION[0]:
            config = self._choose(ident, sizes, of_call, args, kwargs)
        return self._function(*args, **kwargs, **config)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind a method, as a function does."""
        return self if instance is None else MethodType(self, instance)

    def choice(self, *args: Any, **kwargs: Any) -> Choice:
        """The configuration that a call would take now if it measured nothing, and why."""
        sizes = sizes_of(self.name, self._key(*args, **kwargs))
        return self._choice(self._problem(sizes, self._kinds(args, kwargs)))

    def _kinds(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Kind]:
        return kinds(self._names, args, kwargs)

    def _problem(self, sizes: Sizes, of_call: Sequence[Kind]) -> _Problem:
        device = device_of(of_call)
        if device is None:
            raise InputError(f"{self.name}: no argument is a tensor; on which device is this kernel to be measured?")
        bucket, configs = text(sizes), self._space.fitting(sizes, self._constraint)
        if not configs:
            count = len(self._space.configs)
            raise InputError(f"{self.name}: constraint= refuses all {count} configurations for {bucket}.")
        return _Problem(bucket, dtypes_text(of_call), device, configs)

    def _choose(
        self, ident: tuple[Any, ...], sizes: Sizes, of_call: Sequence[Kind], args: tuple[Any, ...], kwargs: Any
    ) -> Config:
        """The configuration of a key that has none yet in this process and generation."""
        problem = self._problem(sizes, of_call)
        choice = self._stored(problem)
        if choice is None and len(problem.configs) > 1 and current_numerics() == "default":
            obstacle = why_not_measured(tensors_in((args, kwargs)), problem.device)
            if obstacle is not None:  # a later call may be free of it: nothing is remembered
                log_once(
                    ("tune-default", self.name, problem.bucket, problem.dtype),
                    f"{self._text(problem)} is not measured, because {obstacle}: {describe(problem.configs[0])} runs",
                    logging.INFO,
                )
                return problem.configs[0]
            with _measuring:
                choice = self._stored(problem) or self._measure(problem, args, kwargs)
        config = self._choice(problem).config if choice is None else choice.config
        self._chosen[ident] = GENERATION[0], config
        return config

    def _choice(self, problem: _Problem) -> Choice:
        stored = self._stored(problem)
        if stored is not None:
            return stored
        if len(problem.configs) == 1:
            return Choice(problem.configs[0], "the only one that fits")
        if current_numerics() != "default":
            return Choice(problem.configs[0], f'the default: numerics is "{current_numerics()}"')
        return Choice(problem.configs[0], "the default: not measured yet")

    def _stored(self, problem: _Problem) -> Choice | None:
        """What a table says, or this process has measured; None where a row does not fit, which is said once."""
        if current_numerics() != "default":  # one for all sizes: a row's bits may depend on its batch
            return None
        key = self._row_key(problem)
        row = table.lookup(*key, device_info(problem.device))
        if row is None:
            return self._measured.get(key)
        for config in problem.configs:
            if equal(config, row.config or {}):
                return Choice(config, f"measured fastest: {row.us:g} us on {row.gpu}, {row.date} ({row.source})")
        log_once(
            ("tune-row", key),
            f"{self._text(problem)}: the row of {row.source} is not used: {row.config} is not in the space",
        )
        return self._measured.get(key)

    def _row_key(self, problem: _Problem) -> tuple[str, str, str, str, str]:
        return f"{USER}.{self.name}", "fwd", problem.bucket, problem.dtype, "default"

    def _text(self, problem: _Problem) -> str:
        return f"{self.name} {problem.bucket} ({problem.dtype}) on {problem.device}"

    def _measure(self, problem: _Problem, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Choice:
        """Measure, and remember in the user's table what is fastest."""
        gpu = device_info(problem.device).name
        with ExitStack() as stack:
            try:
                stack.enter_context(exclusive(f"{gpu} {USER}.{self.name}"))
            except InputError as error:
                log_once(("tune-lock", self.name), f"{self.name}: measured without a lock: {error}")
            table.forget()  # another process may have written since this one read
            choice = self._stored(problem)
            if choice is not None:
                return choice
            logger.info("%s: timing %d configurations", self._text(problem), len(problem.configs))
            try:
                outcome = self._race(problem, args, kwargs)
            except torch.OutOfMemoryError as error:
                why = f"no memory for copies of its arguments ({str(error).splitlines()[0]})"
                logger.warning("%s is not measured: %s", self._text(problem), why)
                return Choice(problem.configs[0], f"the default: {why}")
            except BackendError as error:
                raise BackendError(f"{self._text(problem)}: {error}") from None
            return self._remember(problem, outcome)

    def _race(self, problem: _Problem, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
        call = self._signature.bind(*args, **kwargs)
        with ExitStack() as stack:
            if problem.device.type == "cuda":
                stack.enter_context(torch.cuda.device(problem.device))
            launches = Launches(self._function, call, self._restore, problem.device, self._tolerance)
            return race(launches, problem.configs, problem.device)

    def _remember(self, problem: _Problem, outcome: Outcome) -> Choice:
        best, trials = outcome.best, outcome.trials
        dropped = [trial for trial in trials if trial.reason is not None]
        if dropped:
            wrong = any("wrong" in (t.reason or "") or "restore=" in (t.reason or "") for t in dropped)
            level = logging.WARNING if wrong else logging.INFO
            logger.log(level, "%s: dropped %d configurations:\n%s", self._text(problem), len(dropped), failures(trials))
        us = digits(outcome.samples.median, 5)
        logger.info("%s: %s, %g us, of %d", self._text(problem), describe(best.config), us, len(trials))
        key = self._row_key(problem)
        row = dict(zip(table.KEY, key, strict=True)) | {
            "backend": USER,
            "config": best.row,
            "us": us,
            "noise": digits(outcome.samples.spread, 3),
            "torch_us": None,
        }
        choice = self._measured[key] = Choice(best.config, f"measured fastest: {us:g} us in this process")
        described = machine.describe(problem.device).to_dict()
        try:
            update.update(users_table(described["device"]), header(described), [row])
        except TableError as error:
            log_once(("tune-kept", self.name), f"{self.name}: the next process measures again: {error}")
        return choice


def _without(declared: Signature, name: str, parameters: Sequence[str], restore: Sequence[str]) -> Signature:
    """The signature that a caller sees.  Raises InputError for names that the function does not take."""
    accepted = declared.parameters
    any_keyword = any(p.kind is Parameter.VAR_KEYWORD for p in accepted.values())
    for parameter in parameters:
        if not any_keyword and (parameter not in accepted or accepted[parameter].kind is Parameter.POSITIONAL_ONLY):
            raise InputError(f"tune({name}): the function takes no keyword {parameter}, which the space has.")
    for argument in restore:
        if argument not in accepted or argument in parameters:
            raise InputError(f"tune({name}): restore names {argument}, which is no argument: {', '.join(accepted)}.")
    return declared.replace(parameters=[p for p in accepted.values() if p.name not in parameters])


def _name_of(function: Callable[..., Any]) -> str:
    """Module and name of a function; of a script, the name of its file."""
    module = function.__module__
    file = getattr(sys.modules.get(module), "__file__", None) if module == "__main__" else None
    return f"{Path(file).stem if file else module}.{function.__qualname__}".replace(".<locals>", "")


def _static(sizes: Mapping[str, Any]) -> Sizes:
    """A key under `torch.compile`: sizes that are symbols become those of the traced call, with a guard."""
    return tuple([(field, value if isinstance(value, str) else index(value)) for field, value in sizes.items()])


def _constant_values(handle: str, sizes: Sizes, of_call: Sequence[Kind]) -> tuple[Any, ...]:
    """The values of a configuration, which the compiled program holds: nothing is measured while it is traced."""
    launch = _by_handle[handle]
    config = launch._choice(launch._problem(sizes_of(launch.name, dict(sizes)), of_call)).config
    return tuple(config[parameter] for parameter in launch._space.names)


# What torch.compiler.assume_constant_result sets; calling it would import Dynamo with every import of this module
_constant_values._dynamo_marked_constant = True  # type: ignore[attr-defined]
