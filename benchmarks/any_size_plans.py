"""What `auto` takes for a problem on an H200, planned without one, and in how many kernels torch would compute it.

`auto` takes "torch" where torch has one kernel that is faster.  Where a reference is a formula of several kernels, one
of ours that could run is the better answer; `Planned.eager` tells such a plan.  Torch's kernels are counted on fake
tensors; whether cuDNN or FLASH takes a problem is told by the widths of its heads, as for an H200.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from any_size_draw import Problem
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.bench.cases import Case
from tilewright.dispatch import Plan, implementations
from tilewright.dispatch.options import runnable
from tilewright.ops.attention import vendor
from tilewright.warmup.absent import AbsentDevice
from tilewright.warmup.needed import RawCall, trace_case

ONE_KERNEL = 2
"""Kernels of torch up to which a plan counts as one of torch's own: a product, and what is written beside it."""
_NO_KERNEL = {f"aten::{name}" for name in ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")}
_NO_KERNEL |= {"aten::_unsafe_view"}
_WIDEST = 256


@dataclass(frozen=True)
class Planned:
    """The plan of one call.

    names: of torch's kernels, none where a kernel of ours runs.   on_host: the reference reads data there.
    others: backends of ours that could run it.
    """

    plan: Plan
    names: tuple[str, ...] = ()
    on_host: bool = False
    others: tuple[str, ...] = ()

    @property
    def kernels(self) -> int:
        """How many kernels of torch run."""
        return len(self.names)

    @property
    def eager(self) -> bool:
        """Whether several kernels of torch run where one of ours could."""
        return bool(self.others) and self.plan.row is None and (self.on_host or self.kernels > ONE_KERNEL)


def planned(case: Case) -> Planned:
    """The plan of a case on a GPU of this machine, or on an H200 where it has none."""
    return planned_call(trace_case(case))


def planned_call(call: RawCall) -> Planned:
    """The same of a raw call."""
    raw = call.op
    with FakeTensorMode(), torch.no_grad():
        args = call.on("cuda")
        plan = raw.plan(args, "auto", "default")
        if plan.launch is not None:
            return Planned(plan)
        backends = implementations(raw.op, raw.direction, "cuda")
        others = tuple(name for name in runnable(raw, backends, args, "default") if name != "torch")
        counted, on_host = Kernels(), False
        try:
            with _vendor_of_h200(), AbsentDevice(), counted:
                raw.plain(*args)
        except DataDependentOutputException:
            on_host = True
        return Planned(plan, tuple(counted.names), on_host, others)


class Kernels(TorchDispatchMode):
    """Names torch's operators but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = func._schema.name
        if named.startswith("aten::") and not (func.is_view or named in _NO_KERNEL):
            self.names.append(named.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@contextmanager
def _vendor_of_h200() -> Iterator[None]:
    """Let `vendor` choose as on an H200, which a build of torch without CUDA denies."""
    ours = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient}
    checks = {f"can_use_{name}_attention": check for name, check in ours.items()}
    torchs = {name: getattr(vendor, name) for name in checks}
    vars(vendor).update(checks)
    try:
        yield
    finally:
        vars(vendor).update(torchs)


def _widths(params: Any) -> list[int]:
    return [tensor.shape[-1] for tensor in (params.query, params.key, params.value)]


def _cudnn(params: Any) -> bool:
    return all(width % 8 == 0 and width <= _WIDEST for width in _widths(params))


def _flash(params: Any) -> bool:
    return _cudnn(params) and len(set(_widths(params))) == 1


def _efficient(params: Any) -> bool:
    same_heads = params.query.shape[1] == params.key.shape[1]
    return same_heads and all(width % 4 == 0 for width in _widths(params))


def plans(drawn: Iterable[Problem]) -> list[str]:
    """Lines: how often each kernel is taken, by op, and problems for which `auto` takes several kernels of torch."""
    kernels_by_op: dict[str, Counter[str]] = defaultdict(Counter)
    eager_by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    for problem in drawn:
        case = problem.case()
        answer = planned(case)
        kernels_by_op[problem.op][answer.plan.kernel or answer.plan.backend] += 1
        if answer.eager:
            kernels = "reads data on the host" if answer.on_host else f"{answer.kernels} kernels"
            bucket = f"{answer.plan.bucket} {answer.plan.dtype} {problem.direction}"
            eager_by_reason[problem.op, answer.plan.why].append(
                f"    {bucket}: {kernels}, could be {', '.join(answer.others)}  ({problem.name})"
            )
    lines = [
        f"{op:<26}" + ", ".join(f"{name} {n}" for name, n in counts.most_common())
        for op, counts in sorted(kernels_by_op.items())
    ]
    total = sum(map(len, eager_by_reason.values()))
    lines += ["", f"{total} problems go to several kernels of torch where one of ours could run"]
    for (op, why), rows in sorted(eager_by_reason.items()):
        lines += [f"{op}: {why} ({len(rows)})", *rows]
    return lines
