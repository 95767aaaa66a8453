"""Turn raw calls into compile jobs: plan each call for a GPU that this machine need not have, and collect the kernels
that its launch code would launch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright.dispatch import Plan, implementations
from tilewright.dispatch.backends import check_name
from tilewright.dispatch.options import runnable
from tilewright.jit.collect import Job, collect
from tilewright.warmup.calls import RawCall


@dataclass(frozen=True)
class Failure:
    """A kernel or a call, named by `what`, that could not be prepared."""

    arch: str
    what: str
    reason: str


@dataclass(frozen=True)
class Planned:
    """What one machine needs.   calls: number that a backend can run.   by_torch: number without a kernel of ours."""

    arch: str
    jobs: list[Job]
    failures: list[Failure]
    calls: int
    by_torch: int


def plan(calls: Iterable[RawCall], arch: str, backends: Sequence[str], others: Sequence[Job] = ()) -> Planned:
    """The distinct kernels of `calls` on `arch`, and of `others`, which belong to no call.

    backends: plan each of these that can run a call; none: the one that the dispatcher would choose.
    Raises BackendError for a backend that does not exist.
    """
    for name in backends:
        check_name(name)
    device = "cpu" if arch == "cpu" else "cuda"
    failures, signatures, planned, by_torch = [], set(), 0, 0
    with collect(arch) as collector:
        for job in others:
            collector.add(*job)
        for call in calls:
            if call.signature in signatures or call.op.is_empty(call.args):
                continue
            signatures.add(call.signature)
            plans = _plans(call, device, backends)
            planned += bool(plans)
            for chosen in plans:
                if chosen.launch is None:
                    by_torch += 1
                    continue
                args = call.on("meta")
                try:
                    chosen.launch(call.op.allocate(args, "meta"), *args, config=chosen.config)
                except Exception as error:  # noqa: BLE001 - whatever launch code raises is this call's result
                    what = f"{call.op.key}[{chosen.backend}] {chosen.bucket} {chosen.dtype}"
                    failures.append(Failure(arch, what, f"{type(error).__name__}: {error}"))
    return Planned(arch, collector.jobs, failures, planned, by_torch)


def _plans(call: RawCall, device: str, backends: Sequence[str]) -> list[Plan]:
    with FakeTensorMode():
        args = call.on(device)
        if not backends:
            return [call.op.plan(args, "auto", "default")]
        impls = implementations(call.op.op, call.op.direction, device)
        able = runnable(call.op, impls, args, "default")
        return [call.op.plan(args, f"{name}!", "default") for name in backends if name in able]
