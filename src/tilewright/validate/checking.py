"""`check`: run an op in every execution mode against the oracle, and report."""

import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tilewright.dispatch import Contract, Sample, Workload, contract, contracts
from tilewright.dispatch.backends import check_name
from tilewright.errors import InputError, RefusedError
from tilewright.validate.bits import bits, replicas
from tilewright.validate.case import Case, Findings, NotApplicable
from tilewright.validate.modes import MODES, Mode
from tilewright.validate.report import CheckReport, Result, Status


def check(
    op: str | Contract | Callable[..., Any],
    sample: Sample | Workload | str | tuple[Any, ...] | None = None,
    *,
    modes: str | Sequence[str] = "all",
    backend: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seed: int | None = None,
    compiler: str | None = None,
) -> CheckReport:
    """Check one op against its float64 oracle in every execution mode.  Failures are reported, not raised.

    A mode is skipped where it does not apply to a case, or where planning refuses the requested backend before
    anything is launched.  Whatever goes wrong after that is a failure: a kernel that is not compiled, not loaded, not
    launched.  A report in which no mode ran the op has not passed.

    op        name, contract or public function ("rms_norm", ops.rms_norm).
    sample    a Sample or a tuple of arguments; a Workload or the name of one of the op's workloads or edge cases;
              None for every edge case (heavy modes then run on the first with a batch of four or more).
    modes     "all", "quick" (all but the heavy ones: opcheck, compilation, gradients of
              gradients, forward mode), or names from `validate.MODES`.
    backend   strict, as in a call; None for what `auto` chooses.
    dtype     one dtype; None for all of the contract's with sample=None, else the workload's first.
    device    default: the GPU if there is one.
    seed      default: fresh; it is in the report.
    compiler  torch.compile backend; default "inductor" where it can run, else "aot_eager".

    Raises InputError for an unknown op, workload or mode, BackendError for an unknown backend.
    """
    subject = _subject(op)
    chosen = _modes(modes)
    if backend is not None:
        check_name(backend)
    target = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    start = secrets.randbelow(2**31) if seed is None else seed
    results: list[Result] = []
    problems = list(_problems(subject, sample, dtype, target))
    representative = _representative(subject) if sample is None else None
    for i, problem in enumerate(problems):
        runs = [
            m
            for m in chosen
            if (i == 0 or not m.once) and not (m.heavy and representative and problem.name != representative)
        ]
        if runs:
            case = Case(subject, problem.name, problem.make, backend=backend, seed=start + i, compiler=compiler)
            target = case.device
            results += [_run(mode, case) for mode in runs]
    return CheckReport(subject.name, backend or "auto", str(target), start, tuple(results))


@dataclass(frozen=True)
class _Problem:
    name: str
    make: Callable[[int], Sample]


def _subject(op: str | Contract | Callable[..., Any]) -> Contract:
    import tilewright.ops  # noqa: F401 - binds every contract

    if isinstance(op, Contract):
        return op
    if isinstance(op, str):
        return contract(op)
    for candidate in contracts().values():
        if candidate.function is op:
            return candidate
    raise InputError(f"check: {op!r} is not a public op. Ops: {', '.join(contracts())}.")


def _representative(subject: Contract) -> str | None:
    """The edge case that heavy modes run on: the first with a batch of four or more, which can be a symbolic size."""
    for workload in subject.edge_cases:
        if subject.batch_dim is None:
            return workload.name
        first = subject.inputs(workload.params, subject.dtypes[0], torch.device("cpu"), 0).args[0]
        if first.shape[subject.batch_dim] >= 4:
            return workload.name
    return subject.edge_cases[0].name if subject.edge_cases else None


def _modes(modes: str | Sequence[str]) -> list[Mode]:
    if modes == "all":
        return list(MODES.values())
    if modes == "quick":
        return [m for m in MODES.values() if not m.heavy]
    names = [modes] if isinstance(modes, str) else list(modes)
    unknown = [name for name in names if name not in MODES]
    if unknown or not names:
        raise InputError(f'check: no mode named {", ".join(unknown)}. Allowed: "all", "quick", {", ".join(MODES)}.')
    return [m for m in MODES.values() if m.name in names]


def _problems(subject: Contract, sample: Any, dtype: torch.dtype | None, device: torch.device) -> Iterator[_Problem]:
    if sample is None:
        for workload in subject.edge_cases:
            for each in (dtype,) if dtype is not None else subject.dtypes:
                yield _from_workload(subject, workload, each, device)
    elif isinstance(sample, str | Workload):
        workload = _named(subject, sample) if isinstance(sample, str) else sample
        yield _from_workload(subject, workload, dtype or workload.dtypes[0], device)
    else:
        if dtype is not None:
            raise InputError("check: dtype= goes with a workload; a sample has the dtypes of its tensors.")
        original = sample if isinstance(sample, Sample) else Sample(tuple(sample))
        template = Sample(replicas(original.args), replicas(dict(original.kwargs)))
        variants: dict[int, Sample] = {}

        def make(seed: int) -> Sample:
            # the first request is the sample as given; any other is for different values of the same kind
            first = next(iter(variants), seed)
            return variants.setdefault(seed, template if seed == first else _other_values(template, seed - first))

        yield _Problem("sample", make)


def _from_workload(subject: Contract, workload: Workload, dtype: torch.dtype, device: torch.device) -> _Problem:
    return _Problem(workload.name, lambda seed: subject.inputs(workload.params, dtype, device, seed))


def _named(subject: Contract, name: str) -> Workload:
    workloads = {w.name: w for w in (*subject.workloads, *subject.cpu_workloads, *subject.edge_cases)}
    workload = workloads.get(name) or {n.partition(":")[0]: w for n, w in workloads.items()}.get(name)
    if workload is None:
        raise InputError(f"check({subject.name}): no workload named {name!r}. Allowed: {', '.join(workloads)}.")
    return workload


def _other_values(sample: Sample, turn: int) -> Sample:
    """Other values of the same kind: roll the first argument, and every floating-point tensor, by `turn` elements."""

    def rolled(t: Any) -> Any:
        return bits(t).flatten().roll(turn).view(t.dtype).view(t.shape) if isinstance(t, Tensor) else t

    def weights(v: Any) -> Any:
        return rolled(v) if isinstance(v, Tensor) and v.is_floating_point() else v

    rest, kwargs = tree_map(weights, (sample.args[1:], dict(sample.kwargs)))
    return Sample((tree_map(rolled, sample.args[0]), *rest), kwargs)


def _run(mode: Mode, case: Case) -> Result:
    findings = Findings(case)
    began = time.perf_counter()
    reason = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own settings: TF32, deterministic algorithms
            mode.run(case, findings)
    except (NotApplicable, RefusedError) as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - whatever the op raised is the finding
        findings.faults.append(f"raised {type(error).__name__}: {error}")
    if reason is None and not findings.judged:
        reason = "; ".join(findings.refusals) or "nothing was judged"
    status: Status = "failed" if findings.faults else "passed" if reason is None else "skipped"
    remarks = (*findings.notes, *(f"refused: {text}" for text in findings.refusals))
    details = (reason,) if status == "skipped" and reason else (*findings.faults, *remarks)
    seconds = time.perf_counter() - began
    dtype = str(case.dtype).removeprefix("torch.")
    return Result(case.name, dtype, mode.name, status, details, tuple(findings.measures), seconds, mode.computes)
