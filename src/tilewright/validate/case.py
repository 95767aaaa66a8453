"""One problem under check: an op, one sample of its inputs, the requested backend, and the standards of its results."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tilewright.dispatch import Contract, Plan, RawOp, Sample, record
from tilewright.dispatch.effects import as_tuple, written
from tilewright.errors import RefusedError
from tilewright.validate.bits import replicas, same_bits
from tilewright.validate.metrics import Measure
from tilewright.validate.oracle import Truth, differentiate, gradient_inputs, truth


class RawCall(NamedTuple):
    """A call of a raw op.   preference: its last two arguments, backend and numerics."""

    op: RawOp
    args: tuple[Any, ...]
    preference: tuple[str, str]

    def plan(self) -> Plan:
        """What the raw op would launch for this call."""
        return self.op.plan(self.args, *self.preference)


class Other(NamedTuple):
    """Another sample and its truth, shared by all modes: read it only."""

    sample: Sample
    truth: Truth


class Case:
    """A sample with its truth.  `sample()` returns copies, so that a mode cannot spoil the sample of another."""

    def __init__(
        self,
        contract: Contract,
        name: str,
        make: Callable[[int], Sample],
        *,
        backend: str | None,
        seed: int,
        compiler: str | None = None,
    ) -> None:
        self.contract, self.name, self.backend, self.seed, self.compiler = contract, name, backend, seed, compiler
        self._make = make
        self._sample = make(seed)
        self.first = tensors(self._sample)[0]
        self.device, self.dtype = self.first.device, self.first.dtype
        self.positions = gradient_inputs(contract, self._sample)
        self.truth = truth(contract, self.sample(), seed)
        self._others: dict[int, Other] = {}

    def sample(self) -> Sample:
        """A copy of the inputs."""
        return Sample(replicas(self._sample.args), replicas(dict(self._sample.kwargs)))

    def other(self, number: int = 1) -> "Other":
        """Other values of the same shapes and dtypes, with their truth: a different set for each number from 1.

        Raises NotApplicable if they equal the case's own values.
        """
        if number not in self._others:
            sample = self._make(self.seed + number)
            if all(same_bits(a, b) for a, b in zip(tensors(sample), tensors(self._sample), strict=True)):
                raise NotApplicable("there are no other values of this kind")
            self._others[number] = Other(sample, self.truth_of(sample))
        return self._others[number]

    def truth_of(self, sample: Sample, cotangents: Sequence[Tensor] | None = None) -> Truth:
        """The truth of another sample."""
        replica = Sample(replicas(sample.args), replicas(dict(sample.kwargs)))
        return truth(self.contract, replica, self.seed + 1, cotangents)

    def mapped(self, change: Callable[[Tensor], Tensor], *, mutated: bool = True) -> Sample:
        """The inputs with `change` applied to every tensor; `mutated`: also to those that the op writes into."""
        sample = self.sample()
        same = set() if mutated else {id(t) for t in written(self.contract, sample.args, sample.kwargs)}

        def changed(v: Any) -> Any:
            return change(v) if isinstance(v, Tensor) and id(v) not in same else v

        args, kwargs = tree_map(changed, (sample.args, dict(sample.kwargs)))
        return Sample(args, kwargs)

    def call(self, sample: Sample, **options: Any) -> tuple[Tensor, ...]:
        """Outputs of the public function without gradients, then copies of what it has written into."""
        with torch.no_grad():
            return self.observed(self.function(*sample.args, **sample.kwargs, **options), sample)

    def observed(self, result: Any, sample: Sample) -> tuple[Tensor, ...]:
        """What a call on `sample` has returned, then copies of what it has written into."""
        return (*as_tuple(result), *(t.clone() for t in written(self.contract, sample.args, sample.kwargs)))

    def function(self, *args: Any, **kwargs: Any) -> Any:
        """The public function on the backend under check."""
        return self.contract.function(*args, **kwargs, backend=self.backend)

    def differentiate(
        self,
        sample: Sample,
        positions: Sequence[int] | None = None,
        cotangents: Sequence[Tensor | None] | None = None,
        function: Callable[..., Any] | None = None,
    ) -> tuple[tuple[Tensor, ...], dict[int, Tensor | None]]:
        """Outputs and gradients; by default of every differentiable input, for the truth's cotangents."""
        return differentiate(
            function or self.function,
            sample,
            self.positions if positions is None else positions,
            replicas(self.truth.cotangents) if cotangents is None else cotangents,
        )

    def raw_calls(self, sample: Sample) -> list[RawCall]:
        """The raw calls of one public call: forward, and backward where there is one."""
        return raw_calls(self.contract, self.function, sample)


def raw_calls(contract: Contract, function: Callable[..., Any], sample: Sample) -> list[RawCall]:
    """The raw calls of one call of an op's public `function`: forward, and backward where there is one.

    Raises NotApplicable where there are none: torch computes some options of attention by itself.
    """
    with record() as notes, torch.no_grad():
        function(*sample.args, **sample.kwargs)
    if not notes.calls:
        raise NotApplicable("no raw op is behind this call")
    op, args, *preference = notes.calls[0]
    forward = RawCall(op, args, (preference[0], preference[1]))
    gradient = contract.gradient
    if gradient is None or not gradient.covers(args):
        return [forward]
    plain = tuple(None if isinstance(a, Tensor) else a for a in args)
    needs = tuple(i in gradient.inputs and isinstance(a, Tensor) for i, a in enumerate(args))
    with torch.no_grad():
        outputs = as_tuple(op(*args, *preference))
    cotangents = tuple(torch.randn_like(o) if o.is_floating_point() else None for o in outputs)
    raw = gradient.raw_args(cotangents, gradient.save(args, outputs), plain, needs)
    return [forward, RawCall(gradient.op, raw, forward.preference)]


def tensors(sample: Sample) -> list[Tensor]:
    """Every tensor of a sample, in order."""
    return [v for v in tree_leaves((sample.args, dict(sample.kwargs))) if isinstance(v, Tensor)]


def overwrite(sample: Sample, values: Sample) -> None:
    """Put other values into the same memory."""
    pairs = list(zip(tensors(sample), tensors(values), strict=True))
    if any(stride == 0 and n > 1 for t, _ in pairs for n, stride in zip(t.shape, t.stride(), strict=True)):
        raise NotApplicable("an input is expanded: its elements share memory")
    with torch.no_grad():
        for t, value in pairs:
            t.copy_(value)


class NotApplicable(Exception):
    """Raised by a mode that does not apply to a case; the text is the reason."""


@dataclass
class Findings:
    """The findings of one mode about one case."""

    case: Case
    measures: list[Measure] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    judged: int = 0  # number of judgements

    def require(self, condition: bool, fault: str) -> None:
        """Record `fault` unless `condition` holds."""
        self.judged += 1
        if not condition:
            self.faults.append(fault)

    @contextmanager
    def part(self, name: str) -> Iterator[str]:
        """One of several variants that a mode tries: if planning refuses it, the others still count.

        Yields the prefix of its faults.
        """
        try:
            yield f"{name}: "
        except RefusedError as reason:
            self.refusals.append(f"{name}: {reason}")

    def adopt(self, trial: "Findings") -> None:
        """Add the findings of a trial."""
        self.measures += trial.measures
        self.faults += trial.faults
        self.judged += trial.judged

    def outputs(self, outputs: Sequence[Any], prefix: str = "", against: Truth | None = None) -> None:
        """Judge the outputs of one call."""
        standards = (against or self.case.truth).outputs
        self.require(
            len(outputs) == len(standards), f"{prefix}{len(outputs)} outputs; the reference has {len(standards)}"
        )
        for standard, ours in zip(standards, outputs, strict=False):
            self.measure(standard.judge(ours), prefix)

    def gradients(self, grads: dict[int, Any], prefix: str = "", against: Truth | None = None) -> None:
        """Judge gradients by position."""
        standards = (against or self.case.truth).gradients
        for i, ours in grads.items():
            self.measure(standards[i].judge(ours), prefix)

    def measure(self, measure: Measure, prefix: str = "") -> None:
        """Record the measure of one tensor."""
        self.judged += 1
        self.measures.append(measure)
        self.faults.extend(prefix + fault for fault in measure.faults)
