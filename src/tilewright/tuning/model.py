"""`tune_model`: the sizes of one model, recorded while it runs, those with the most time first."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tilewright.bench.cases import Case
from tilewright.dispatch import Plan, RawOp, Workload, contract, record
from tilewright.dispatch.recording import Recording
from tilewright.dispatch.tables.measured import measured_us
from tilewright.dispatch.tables.staleness import changes
from tilewright.errors import InputError, PatchError
from tilewright.log import logger
from tilewright.models.patching import plan_patch
from tilewright.models.specialise import patched_modules
from tilewright.models.stand_in import unmeasured_sizes
from tilewright.tuning.pace import foreseen_us
from tilewright.tuning.problem import Problem, modules_of
from tilewright.tuning.recorded import RecordedCall, cost_of, recorded_call
from tilewright.tuning.report import Report, Untuned
from tilewright.tuning.run import Job, Progress, Run, refuse_here
from tilewright.tuning.space import Search, space
from tilewright.warmup.calls import RawCall
from tilewright.warmup.requests import STEPS, is_language_model, prompts_of, run_requests, takes

TOKENS, NEW_TOKENS, BATCH = (1024, 1000), 128, 1
"""What is run by default: two prompts, because kernels treat lengths that are a multiple of 16 differently."""


@dataclass
class Size:
    """A key of the tables and the calls that have it.

    plan      that of the first call
    calls     number in one request for each prompt
    largest   of the calls, by bytes: the one that is timed.   smallest: the one that is checked first
    refused   why the call cannot be a problem; None where it can
    """

    raw: RawOp
    plan: Plan
    device_type: str
    calls: float = 0.0
    largest: RecordedCall | None = None
    smallest: RecordedCall | None = None
    refused: str | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """(op, direction, bucket, dtype, numerics), as a table row has it."""
        return self.raw.op, "fwd", self.plan.bucket, self.plan.dtype, "default"

    @property
    def is_measured(self) -> bool:
        """True if the tables in force have a row of today's versions."""
        return self.plan.row is not None and not changes(self.plan.row, self.device_type)

    def add(self, form: RecordedCall) -> None:
        """Note one more form of call."""
        if self.largest is None or form.nbytes > self.largest.nbytes:
            self.largest = form
        if self.smallest is None or form.nbytes < self.smallest.nbytes:
            self.smallest = form


@dataclass(eq=False)
class Sizes(Recording):
    """A recording that keeps forms in place of tensors.   weight: calls that each recorded one stands for."""

    sizes: dict[tuple[str, ...], Size] = field(default_factory=dict)
    weight: float = 1.0
    _seen: dict[tuple[Any, ...], Size] = field(default_factory=dict)

    def add(self, raw: RawOp, args: tuple[Any, ...], backend: str, numerics: str, plan: Plan) -> None:
        """Count the call, and keep its form if that is new."""
        device = raw.device_of(args)
        if raw.direction != "fwd" or raw.is_empty(args) or not raw.has_kernels(device.type):
            return
        signature = RawCall(raw, args).signature
        size = self._seen.get(signature)
        if size is None:
            new = Size(raw, raw.plan(args, "auto", "default"), device.type)
            size = self._seen[signature] = self.sizes.setdefault(new.key, new)
            try:
                size.add(recorded_call(contract(raw.op), args))
            except InputError as error:
                size.refused = str(error)
        size.calls += self.weight


def tune_model(
    model: nn.Module,
    inputs: Any = None,
    *,
    tokens: Sequence[int] = TOKENS,
    new_tokens: int = NEW_TOKENS,
    batch: int = BATCH,
    fp8: bool = False,
    backend: str | None = None,
    search: Search = "exhaustive",
    budget: float | None = None,
    min_gain: float = 0.03,
    path: Path | None = None,
    seconds: float = 60.0,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Find the fastest choice for every size that `model` runs, those with the most time in a request first.

    inputs      token ids (B, S) for a language model; for others a tensor, tuple or mapping for the forward; or a list
                of those.  None: `batch` prompts of each length in `tokens`
    new_tokens  decoded after each prompt; a few steps are run and count for all
    fp8         the model as `patch(fp8=True)` leaves it

    The model is patched for the recording and as before afterwards, a patched one is recorded as it is; linear layers
    and attention count although nothing was measured yet.  Sizes with a fresh row in the table are left out, so a run
    that its budget ended goes on in the next one.  All else as in `tune`.
    """
    device = device_of(model)
    refuse_here(device, backend)
    sizes = sizes_of(model, inputs, tokens=tokens, new_tokens=new_tokens, batch=batch, fp8=fp8)
    return tune_sizes(sizes, Run(device, search, backend, min_gain, path, seconds, seed), budget, progress)


def tune_sizes(sizes: Sequence[Size], run: Run, budget: float | None, progress: Progress | None = None) -> Report:
    """Tune those of `sizes` that have no fresh row in the table, those with the most time first; see `tune_model`."""
    due = [size for size in sizes if not run.is_fresh(size.key)]
    run.report.fresh = len(sizes) - len(due)
    jobs = []
    for size in due:
        if size.refused is None:
            jobs.append(_job(size, run.device, run.report.seed))
        else:
            key = size.raw.op, size.plan.bucket, size.plan.dtype, "fwd"
            run.report.untuned.append(Untuned(*key, size.refused, failed=False))
    return run.all(sorted(jobs, key=lambda job: -job.weight), budget, progress)


def sizes_of(
    model: nn.Module,
    inputs: Any = None,
    *,
    tokens: Sequence[int] = TOKENS,
    new_tokens: int = NEW_TOKENS,
    batch: int = BATCH,
    fp8: bool = False,
) -> list[Size]:
    """Every size of our ops that a request to `model` runs, each once; the model is as before afterwards.

    Arguments as in `tune_model`.
    """
    device = device_of(model)
    notes = Sizes()
    with unmeasured_sizes(), _patched(model, device, fp8), torch.no_grad(), record(notes):
        for weight in _calls(model, inputs, device, tokens, new_tokens, batch):
            notes.weight = weight
    return list(notes.sizes.values())


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter or buffer; the CPU where there is none."""
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def choices(size: Size, device: torch.device) -> int:
    """Number of kernels and configurations of ours that could run this size."""
    trials = space(_problem(size, device, 0), "exhaustive").trials
    return sum(trial.backend != "torch" for trial in trials)


def _calls(
    model: Any, inputs: Any, device: torch.device, tokens: Sequence[int], new_tokens: int, batch: int
) -> Iterator[float]:
    """Run the model; yields before each call how many such calls there are."""
    examples = tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, inputs)
    examples = examples if isinstance(inputs, list) else [examples]
    if is_language_model(model) and not any(isinstance(e, Mapping) and "input_ids" not in e for e in examples):
        prompts = [_token_ids(example) for example in examples if example is not None]
        prompts = prompts or list(prompts_of(batch, _fitting(model, tokens, new_tokens), device))
        last = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}
        yield from run_requests(model, prompts, new_tokens, **last)  # as `generate` asks for them
        return
    for example in examples:
        if example is None:
            raise InputError(f"tune_model: {type(model).__name__} is no language model; pass inputs= for its forward.")
        yield 1.0
        if isinstance(example, Mapping):
            model(**example)
        else:
            model(*(example if isinstance(example, tuple) else (example,)))


def _token_ids(example: Any) -> Tensor:
    """Token ids (B, S) of an example."""
    ids = (
        example["input_ids"] if isinstance(example, Mapping) else example[0] if isinstance(example, tuple) else example
    )
    return ids if ids.dim() == 2 else ids[None]


def _fitting(model: Any, tokens: Sequence[int], new_tokens: int) -> list[int]:
    """The lengths, cut to the positions that the model has."""
    positions = getattr(model.config, "max_position_embeddings", None)
    longest = max(tokens) if positions is None else max(1, positions - min(new_tokens, STEPS))
    if longest < max(tokens):
        logger.info("%s has %d positions: prompts are cut to %d tokens", type(model).__name__, positions, longest)
    return list(dict.fromkeys(min(length, longest) for length in tokens))


@contextmanager
def _patched(model: nn.Module, device: torch.device, fp8: bool) -> Iterator[None]:
    """The model with our ops inside, whether or not they were measured; of a patched one, its other linear layers."""
    already = next(patched_modules(model), None) is not None
    try:
        applied = plan_patch(model, device, fp8, ["linear"] if already else None)
    except PatchError as error:
        logger.info("%s", error)  # it may call ops itself
        yield
        return
    applied.apply()
    try:
        yield
    finally:
        applied.undo()


def _job(size: Size, device: torch.device, seed: int) -> Job:
    """The problem of a size; its weight is the time of all its calls, measured or foreseen."""
    dtype = getattr(torch, size.plan.dtype)
    case = Case(contract(size.raw.op), Workload(size.plan.bucket, {}, (dtype,), ("fwd",)), dtype, "fwd")
    us = measured_us(size.plan)
    if us is None or not size.is_measured:
        assert size.largest is not None
        us = foreseen_us(cost_of(size.raw, size.largest), dtype, device)
    return Job(case, _problem(size, device, seed), size.calls * us)


def _problem(size: Size, device: torch.device, seed: int) -> Problem:
    subject, dtype = contract(size.raw.op), getattr(torch, size.plan.dtype)
    modules = modules_of(subject, device.type)
    return Problem(
        subject.name, "fwd", {}, dtype, str(device), seed, modules, True, recorded=size.largest, checked=size.smallest
    )
