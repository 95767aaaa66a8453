"""Run one problem of the edge grid on one backend: forward, backward, their tapes, and launches into guarded outputs.

Inputs lie inside of larger buffers, the first element as many bytes behind a boundary as the problem says, and all
around them lies 0xFF: NaN in every format, -1 as an integer.  What is read beyond a tensor so shows in the result, and
what is written there is found afterwards.  Fresh memory, outputs and workspaces, holds NaN.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tilewright.dispatch import Contract, Sample
from tilewright.errors import InputError, RefusedError
from tilewright.validate.case import NotApplicable, RawCall, raw_calls, tensors
from tilewright.validate.edge_grid import EdgeProblem
from tilewright.validate.modes.memory import guarded, poisoned, surroundings
from tilewright.validate.oracle import Truth, as_tuple, differentiate, gradient_inputs, truth

GUARD = 4096  # bytes on both sides of what is given and of what is written
_BOUNDARY = 256
_REPEATS = 2  # of a call whose plan is known: one makes the tape, one replays it


@dataclass
class EdgeResult:
    """status: "passed", "failed", or "refused" where planning or a check said in words that it cannot be done.
    refused_backward: why the forward ran and the backward was refused.
    """

    status: str = "passed"
    details: list[str] = field(default_factory=list)
    refused_backward: str | None = None


class _Refused(Exception):
    """Before anything was launched."""


def run_problem(
    contract: Contract, problem: EdgeProblem, backend: str, device: torch.device, *, judged: bool = True
) -> EdgeResult:
    """Run `problem` on exactly `backend`.  judged=False: nothing is compared, and no guard lies behind a tensor, for
    runs under a tool that watches every access itself.
    """
    result = EdgeResult()
    try:
        with warnings.catch_warnings(), poisoned():
            warnings.simplefilter("ignore")
            _run(contract, problem, backend, device, judged, result)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except _Refused as reason:
        return EdgeResult("refused", [str(reason)])
    except Exception as error:  # noqa: BLE001 - whatever was raised is the finding
        result.details.append(f"raised {type(error).__name__}: {error}")
    if result.details:
        result.status = "failed"
    return result


def _run(
    contract: Contract, problem: EdgeProblem, backend: str, device: torch.device, judged: bool, result: EdgeResult
) -> None:
    inputs = contract.inputs(problem.params, problem.dtype, device, problem.seed)
    sample = placed(inputs, problem.offset, GUARD if judged else 0)
    memory = _memory(sample)
    before = [m.clone() for m in memory]

    def function(*args: Any, **kwargs: Any) -> Any:
        return contract.function(*args, **kwargs, backend=backend)

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return as_tuple(function(*sample.args, **sample.kwargs))

    outputs = _planned(forward)
    exact = truth(contract, inputs, problem.seed) if judged else None
    cotangents = _cotangents(outputs, exact, problem)
    _judge(result, exact, outputs, "")
    positions = gradient_inputs(contract, sample)

    def both() -> tuple[tuple[Tensor, ...], dict[int, Tensor | None]]:
        return differentiate(function, sample, positions, cotangents)

    try:
        if positions:
            _judge(result, exact, *_planned(both), "with gradients: ")
    except _Refused as reason:
        result.refused_backward, positions = str(reason), ()
    for repeat in range(_REPEATS):
        outputs = forward()
        grads = both()[1] if positions else {}
        if repeat == _REPEATS - 1:
            _judge(result, exact, outputs, grads, "on tape: ")
    if not result.refused_backward:
        with suppress(NotApplicable):  # no raw op is behind the call
            for call in raw_calls(contract, function, sample):
                _launch_guarded(call, problem.offset, device, result)
    for i, (old, now) in enumerate(zip(before, memory, strict=True)):
        if not torch.equal(old, now):
            first_byte = int((old != now).nonzero()[0])
            result.details.append(
                f"memory {i} of the inputs, or beside them, was written to: first at byte {first_byte}"
            )


def _planned(call: Callable[[], Any]) -> Any:
    """What `call` returns.  What a check or planning says it cannot do is a refusal; a `BackendError` of any other kind
    is a kernel that was not compiled, loaded or launched.
    """
    try:
        return call()
    except InputError as reason:
        raise _Refused(f"InputError: {reason}") from reason
    except RefusedError as reason:
        raise _Refused(str(reason)) from reason


def placed(sample: Sample, offset: int, guard: int) -> Sample:
    """`sample` in other memory: each storage `offset` bytes behind a boundary, or one element where that is more, with
    `guard` bytes of 0xFF on both sides.
    """
    copies: dict[int, tuple[Tensor, int]] = {}

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage, size = value.untyped_storage(), value.element_size()
        key = storage._cdata
        if key not in copies:
            start = -(-guard // _BOUNDARY) * _BOUNDARY + -(-offset // size) * size
            memory = torch.full((start + storage.nbytes() + guard,), 0xFF, dtype=torch.uint8, device=value.device)
            bytes_of = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            memory[start : start + storage.nbytes()] = bytes_of
            copies[key] = memory, start
        memory, start = copies[key]
        first = start // size + value.storage_offset()
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(
            memory.untyped_storage(), first, value.shape, value.stride()
        )

    args, kwargs = tree_map(place, (sample.args, dict(sample.kwargs)))
    return Sample(args, kwargs)


def _memory(sample: Sample) -> list[Tensor]:
    """The bytes of every storage of a sample, once."""
    storages = {t.untyped_storage()._cdata: t for t in tensors(sample)}
    return [
        torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())  # shares memory
        for t in storages.values()
    ]


def _cotangents(outputs: Sequence[Tensor], exact: Truth | None, problem: EdgeProblem) -> list[Tensor]:
    if exact is not None:
        return [c.clone() for c in exact.cotangents]
    generator = torch.Generator().manual_seed(problem.seed)
    return [torch.randn(o.shape, generator=generator).to(o) for o in outputs]


def _judge(result: EdgeResult, exact: Truth | None, outputs: Sequence[Tensor], *rest: Any) -> None:
    """By the rule of `check`.  rest: gradients, where there are some, and what to say in front of a fault."""
    if exact is None:
        return
    grads, where = rest if len(rest) == 2 else ({}, rest[0])
    if len(outputs) != len(exact.outputs):
        result.details.append(f"{where}{len(outputs)} outputs; the reference has {len(exact.outputs)}")
    measures = [standard.judge(ours) for standard, ours in zip(exact.outputs, outputs, strict=False)]
    measures += [exact.gradients[i].judge(grad) for i, grad in grads.items()]
    result.details += [where + fault for measure in measures for fault in measure.faults]


def _launch_guarded(call: RawCall, offset: int, device: torch.device, result: EdgeResult) -> None:
    """Launch the implementation itself into outputs that begin `offset` bytes behind a boundary."""
    plan = call.plan()
    outs = call.op.allocate(call.args, "meta")
    if plan.launch is None or call.op.compose is not None or not any(o.numel() for o in outs):
        return
    if call.args[0].numel() == 0:  # the machinery computes the reference there
        return
    buffers = [
        guarded(tuple(o.shape), o.dtype, device, GUARD, -(-offset // o.element_size()), o.stride()) for o in outs
    ]
    around = [surroundings(o) for o in buffers]
    plan.launch(tuple(buffers), *call.args, config=plan.config)
    for i, (out, old) in enumerate(zip(buffers, around, strict=True)):
        for side, was, now in zip(("before", "after"), old, surroundings(out), strict=True):
            if not torch.equal(was, now):
                result.details.append(f"{call.op.key} output {i}: memory {side} the output was overwritten")
