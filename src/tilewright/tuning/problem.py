"""A problem to tune: one raw op on one workload, as plain data from which a worker rebuilds the rest."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from tilewright.dispatch import Contract, RawOp, Sample, contract, implementations
from tilewright.dispatch.contract import Direction
from tilewright.dispatch.recording import first_call
from tilewright.tuning.recorded import RecordedCall, on_raw_arguments

SMALL = 37  # rows of the small problem of the check: odd, so that the last block of every tiling is masked


@dataclass(frozen=True)
class Problem:
    """One raw op on one workload.

    params, dtype  those of the workload
    modules        imported in the worker, so that the op and its backends are registered
    inference      the workload has no backward
    recorded       the call in place of the workload's sizes: `params` are empty then
    checked        a smaller call of the same bucket, on which candidates are checked first; `recorded` where None
    """

    op: str
    direction: Direction
    params: Mapping[str, Any]
    dtype: torch.dtype
    device: str
    seed: int
    modules: tuple[str, ...]
    inference: bool = False
    recorded: RecordedCall | None = None
    checked: RecordedCall | None = None

    @property
    def contract(self) -> Contract:
        """The op's contract; that of a recorded call takes the raw op's arguments."""
        for module in self.modules:
            import_module(module)
        subject = contract(self.op)
        return subject if self.recorded is None else on_raw_arguments(subject, self.recorded)

    @property
    def raw(self) -> RawOp:
        """The raw op: forward or backward."""
        (raw_op,) = [raw for raw in self.contract.raw_ops if raw.direction == self.direction]
        return raw_op

    def sample(self) -> Sample:
        """Arguments of the public function: fresh random tensors on the device."""
        return self.contract.inputs(self.params, self.dtype, torch.device(self.device), self.seed)


class Call(NamedTuple):
    """A raw op with its arguments."""

    raw: RawOp
    args: tuple[Any, ...]


def modules_of(subject: Contract, device_type: str) -> tuple[str, ...]:
    """The modules whose import registers an op and its implementations."""
    names = ["tilewright.ops", subject.function.__module__]
    for raw in subject.raw_ops:
        impls = implementations(raw.op, raw.direction, device_type)
        names += [implementation.launch.__module__ for implementation in impls.values()]
    return tuple(dict.fromkeys(names))


def raw_call(problem: Problem, sample: Sample) -> Call:
    """The raw op with the arguments that the public function passes; only torch runs.  Cotangents are random."""
    with torch.no_grad():
        raw, args, _, _ = first_call(problem.contract.function, *sample.args, **sample.kwargs, backend="torch")
        if problem.direction == "fwd":
            return Call(raw, args)
        result = raw.plain(*args)
    gradient = problem.contract.gradient
    assert gradient is not None, "a case has a backward only where the contract has one"
    outputs = (result,) if isinstance(result, Tensor) else tuple(result)
    cotangents = tuple(torch.randn_like(output) if output.is_floating_point() else None for output in outputs)
    plain = tuple(None if isinstance(a, Tensor) else a for a in args)
    needs = tuple(i in gradient.inputs and isinstance(a, Tensor) for i, a in enumerate(args))
    return Call(gradient.op, gradient.raw_args(cotangents, gradient.save(args, outputs), plain, needs))


@contextmanager
def fake_call(problem: Problem, *, meta: bool = False) -> Iterator[Call]:
    """Yield the call on fake tensors of the device, which this machine need not have, or on meta tensors."""
    if problem.recorded is not None:  # its form says all, also where each tensor begins
        with nullcontext() if meta else FakeTensorMode():
            yield Call(problem.raw, problem.recorded.on("meta" if meta else problem.device))
        return
    with FakeTensorMode():
        sample = problem.contract.inputs(problem.params, problem.dtype, torch.device("cpu"), problem.seed)
    # The reference is traced on meta tensors: slicing a fake GPU tensor needs a GPU
    raw, raw_args = raw_call(problem, Sample(_like(sample.args, "meta"), _like(dict(sample.kwargs), "meta")))
    if meta:
        yield Call(raw, _like(raw_args, "meta"))
        return
    with FakeTensorMode():
        yield Call(raw, _like(raw_args, problem.device))


def _like(values: Any, device: str) -> Any:
    """Replace each tensor in `values` by an empty one on `device`, of the same strides."""

    def empty(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    return tree_map(empty, values)


def bucket_of(problem: Problem, numerics: str = "default") -> tuple[int, ...]:
    """The bucket: the sizes that the choice for this problem depends on."""
    with fake_call(problem) as call:
        return call.raw.bucket_of(call.args, numerics)


def shrink_rows(problem: Problem) -> Problem:
    """The same problem with fewer rows, for costly checks: shrinks sizes that the batch-invariant bucket leaves out."""
    if problem.recorded is not None:
        return replace(problem, recorded=problem.checked or problem.recorded)
    fixed = bucket_of(problem, "batch_invariant")
    for name, size in problem.params.items():
        if type(size) is int and size > SMALL:
            trial = replace(problem, params={**problem.params, name: SMALL})
            if _bucket_without_batch(trial) == fixed:
                problem = trial
    return problem


def _bucket_without_batch(problem: Problem) -> tuple[int, ...] | None:
    """The batch-invariant bucket; None for sizes that do not fit together, such as fewer heads than groups."""
    try:
        return bucket_of(problem, "batch_invariant")
    except (ValueError, RuntimeError):
        return None
