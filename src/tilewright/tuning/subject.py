"""A problem in a worker: its tensors, the standards its results are judged by, and its timing."""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from tilewright.bench.accuracy import tensors
from tilewright.bench.cases import Case as BenchCase
from tilewright.bench.contestants import Contestant, prepare, random_cotangents, reference_outputs
from tilewright.bench.graph import capture, interleave_replays
from tilewright.bench.pacing import MAX_LAUNCHES
from tilewright.bench.peers import bound
from tilewright.bench.rotation import rotate, sets_for
from tilewright.bench.timing import interleave
from tilewright.dispatch import Implementation, Sample, Workload, implementations, register_impl, unregister_impl
from tilewright.dispatch.effects import as_tuple
from tilewright.dispatch.options import runnable
from tilewright.tuning.pace import launches
from tilewright.tuning.problem import Problem, fake_call, raw_call, shrink_rows
from tilewright.validate.bits import memory, replicas
from tilewright.validate.case import Case, Findings
from tilewright.validate.modes import MODES
from tilewright.validate.modes.memory import GUARD, guarded, poisoned
from tilewright.validate.oracle import convert, jitter_dtype_of
from tilewright.validate.rule import Standard, standard

_CHECKS = {"fwd": ("eager", "poison", "inputs_unchanged"), "bwd": ("backward", "poison", "inputs_unchanged")}

LARGEST_CHECKED = 1 << 30  # bytes
_JITTERS = 2  # each runs the reference on the whole problem
_ORDER = 2.0**-20  # a few float32 roundings: sums of a whole problem are long, and every order of summation is right

Call = Callable[[], object]


class Subject:
    """A problem with its own tensors: no candidate gets those of a user."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.contract, self.device = problem, problem.contract, torch.device(problem.device)
        self.sample = problem.sample()
        self.raw, self.args = raw_call(problem, self.sample)
        self.cost = self.contract.cost(self.sample, problem.direction)
        self._small_problem = shrink_rows(problem)
        self._small = self._small_case() if self._fits(self._small_problem) else None
        self._standards = self._make_standards()

    def implementation(self, backend: str) -> Implementation:
        """The registered implementation of a backend."""
        return implementations(self.raw.op, self.raw.direction, self.device.type)[backend]

    # Correctness.

    def check(self, backend: str, config: Any) -> str | None:
        """Why a candidate is wrong, or None: first a small problem, tile by tile, then the one that is timed."""
        if backend == "torch":
            return None
        chosen = self.implementation(backend)
        with _installed(chosen, config):
            fault = self._validate(backend)
        return fault or self._judge_guarded(chosen, config)

    def _validate(self, backend: str) -> str | None:
        """`validate`'s own modes on few rows: the float64 oracle, fresh inputs, poisoned memory, untouched inputs."""
        if self._small is None or not self._takes_few_rows(backend):
            return None
        self._small.backend = backend
        for name in _CHECKS[self.problem.direction]:
            findings = Findings(self._small)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of the deterministic algorithms that poisoning sets
                MODES[name].run(self._small, findings)
            if findings.faults:
                return f"wrong ({name}): {findings.faults[0]}"
        return None

    @staticmethod
    def _fits(problem: Problem) -> bool:
        """False for a recorded call too large for the many references of `validate`; it is judged as a whole alone."""
        return problem.recorded is None or problem.recorded.nbytes <= LARGEST_CHECKED

    def _takes_few_rows(self, backend: str) -> bool:
        """True if the public function can run the small problem on `backend`, forward and backward."""
        for problem in (replace(self._small_problem, direction="fwd"), self._small_problem):
            with fake_call(problem) as (raw, args):
                impls = implementations(raw.op, raw.direction, self.device.type)
                if backend not in runnable(raw, impls, args, "default"):
                    return False
        return True

    def _small_case(self) -> Case:
        def make(seed: int) -> Sample:
            return replace(self._small_problem, seed=seed).sample()

        case = Case(self.contract, "tuning", make, backend=None, seed=self.problem.seed)
        if self.problem.direction == "fwd":
            case.positions = ()  # the modes then skip the backward
        return case

    def _judge_guarded(self, chosen: Implementation, config: Any) -> str | None:
        """Launch into NaN-filled outputs with noise on both sides: every element is written, and nothing else."""
        outs = tuple(
            guarded(tuple(t.shape), t.dtype, self.device, GUARD, 0, t.stride())
            for t in self.raw.allocate(self.args, "meta")
        )
        args = list(self.args)
        for i in self._mutated_positions(args):
            t = args[i]
            args[i] = guarded(tuple(t.shape), t.dtype, self.device, GUARD, 0, t.stride()).copy_(t)
        outs = (*outs, *self._mutated(args))
        edges = [(edge, edge.clone()) for t in outs for edge in _edges(t)]
        with poisoned(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chosen.launch(outs[: self.raw.count], *args, config=config)
        if any(not torch.equal(edge, before) for edge, before in edges):
            return "wrong: wrote outside its outputs"
        return self._judge(outs)

    def _judge(self, outs: object) -> str | None:
        measures = (expected.judge(ours) for expected, ours in zip(self._standards, tensors(outs), strict=True))
        return next((f"wrong: {fault}" for measure in measures for fault in measure.faults), None)

    def _make_standards(self) -> list[Standard]:
        """Standards for the whole problem, tile by tile: the reference in float64, and torch in the problem's dtype."""
        exact, torchs = self._reference(torch.float64), self._reference(None)
        noise = torch.Generator(self.device).manual_seed(self.problem.seed)
        noisy = [self._reference(jitter_dtype_of(Sample(self.args)), noise) for _ in range(_JITTERS)]
        contract = self.contract
        factor = contract.tolerance if self.problem.direction == "fwd" else contract.widest_gradient_tolerance
        return [
            standard(
                f"output {i}", exact[i].double(), torchs[i], [n[i] for n in noisy], factor, order=_ORDER, ulps=False
            )
            for i in range(len(torchs))
        ]

    def _reference(self, dtype: torch.dtype | None, noise: torch.Generator | None = None) -> list[Tensor]:
        args = list(convert(self.args, dtype, noise))
        for i in self._mutated_positions(args):
            args[i] = args[i].clone()
        return [*as_tuple(self.raw.plain(*args)), *self._mutated(args)]

    def _mutated(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """The arguments that a call writes into."""
        return tuple(args[i] for i in self._mutated_positions(args))

    def _mutated_positions(self, args: Sequence[Any]) -> list[int]:
        return [i for i in self.raw.mutated if args[i] is not None]

    # Timing.

    def time(self, choices: Sequence[tuple[str, Any]], rounds: int) -> list[list[float] | str]:
        """Interleaved device times in microseconds, one for each round; or why a choice cannot be timed."""
        timed_calls: dict[str, Call] = {}
        reasons: dict[str, str] = {}
        graph = self._launches
        with torch.inference_mode(self.problem.direction == "fwd"):
            for i, (backend, config) in enumerate(choices):
                try:
                    call = rotate(self._calls(backend, config))
                    timed_calls[str(i)] = capture(call, launches=graph, device=self.device) if graph else call
                except RuntimeError as error:
                    reasons[str(i)] = f"cannot be captured: {error}".splitlines()[0][:200]
            if graph:
                timed = interleave_replays(timed_calls, device=self.device, launches=graph, rounds=rounds, evict=True)
            else:
                timed = interleave(timed_calls, device=self.device, rounds=rounds)
            for name in timed:
                backend, config = choices[int(name)]
                fault = None if backend == "torch" else self._judge(self._call(backend, config, self._sets[0])())
                if fault is not None:
                    reasons[name] = f"after timing: {fault}"
        del timed_calls
        gc.collect()  # graphs hold their memory
        return [reasons.get(str(i)) or timed[str(i)].us for i in range(len(choices))]

    @cached_property
    def _launches(self) -> int | None:
        return launches(self.cost, self.problem.dtype, self.device, inference=self.problem.inference)

    @cached_property
    def _sets(self) -> list[tuple[Any, ...]]:
        """Copies of the arguments, enough that every call finds a cold L2."""
        touched = self.cost.bytes_read + self.cost.bytes_written
        count = sets_for(touched, self.device, at_most=self._launches or MAX_LAUNCHES)
        return [self.args, *(replicas(self.args) for _ in range(count - 1))]

    def _calls(self, backend: str, config: Any) -> list[Call]:
        if backend == "torch" and self.problem.direction == "bwd":
            return self._autograd()
        return [self._call(backend, config, args) for args in self._sets]

    def _call(self, backend: str, config: Any, args: tuple[Any, ...]) -> Call:
        if backend == "torch":
            return lambda: self.raw.plain(*args)
        launch = self.implementation(backend).launch

        def call() -> tuple[Tensor, ...]:
            outs = self.raw.allocate(args, self.device)
            launch(outs, *args, config=config)
            return (*outs, *self._mutated(args))

        return call

    def _autograd(self) -> list[Call]:
        """Calls of torch's own backward, as a model without this library runs it: `torch_us` is its time."""
        contract, seed = self.contract, self.problem.seed
        workload = Workload("tuning", self.problem.params, (self.problem.dtype,))
        case = BenchCase(contract, workload, self.problem.dtype, "bwd")
        torchs = Contestant("torch", True, partial(bound, partial(contract.function, backend="torch")))
        cotangents = random_cotangents(reference_outputs(contract, self.sample, "fwd", ()), seed)
        calls = (prepare(torchs, self.sample, case, cotangents) for _ in self._sets)
        return [call for call in calls if call is not None]


@contextmanager
def _installed(chosen: Implementation, config: Any) -> Iterator[None]:
    """Make the public function run `chosen` with this config inside the block, in this worker alone."""

    def launch(outs: tuple[Tensor, ...], *args: Any, **plan_options: Any) -> None:
        chosen.launch(outs, *args, config=config)

    chosen = chosen.kernel_of(config)
    unset = ("op", "launch", "kernel", "kernels")  # not options of a registration
    options = {f.name: getattr(chosen, f.name) for f in fields(chosen) if f.name not in unset}
    register_impl(chosen.op, **options)(launch)
    try:
        yield
    finally:
        unregister_impl(chosen.op, backend=chosen.backend, direction=chosen.direction)


def _edges(t: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes before and after a guarded output; they share its memory."""
    storage, width = memory(t), GUARD * t.element_size()
    return storage[:width], storage[-width:]
