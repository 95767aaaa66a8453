"""Run one problem of the edge grid on one backend: forward, backward, their tapes, and launches into guarded outputs.

Inputs lie inside larger buffers, at the problem's offset from a boundary, and the bytes around them are 0xFF: NaN in
every format, -1 as an integer.  So a read beyond a tensor shows in the result, and a write there is found afterwards.
Fresh memory (outputs and workspaces) holds NaN.
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
from tilewright.dispatch.effects import as_tuple, written
from tilewright.errors import InputError, RefusedError
from tilewright.validate.case import NotApplicable, RawCall, raw_calls, tensors
from tilewright.validate.edge_grid import EdgeProblem
from tilewright.validate.modes.memory import guarded, poisoned, surroundings
from tilewright.validate.oracle import Truth, differentiate, gradient_inputs, truth

GUARD = 4096  # bytes on both sides of every input and output
_BOUNDARY = 256
_REPEATS = 2  # after the first call: one makes the tape, one replays it


@dataclass
class EdgeResult:
    """status: "passed", "failed", or "refused" where planning or a check raised its own error before any launch.
    refused_backward: why the backward was refused although the forward ran.
    """

    status: str = "passed"
    details: list[str] = field(default_factory=list)
    refused_backward: str | None = None


class _Refused(Exception):
    """Planning or a check refused the call before any launch."""


def run_problem(
    contract: Contract, problem: EdgeProblem, backend: str, device: torch.device, *, judged: bool = True
) -> EdgeResult:
    """Run `problem` on exactly `backend`.

    judged=False: compare nothing and add no guards, for runs under a tool that checks every access itself.
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
    memory = _memory(sample, written(contract, sample.args, sample.kwargs))
    before = [m.clone() for m in memory]

    def function(*args: Any, **kwargs: Any) -> Any:
        return contract.function(*args, **kwargs, backend=backend)

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            returned = as_tuple(function(*sample.args, **sample.kwargs))
            return (*returned, *written(contract, sample.args, sample.kwargs))

    outputs = _refusable(forward)
    exact = truth(contract, inputs, problem.seed) if judged else None
    cotangents = _cotangents(outputs, exact, problem)
    _judge(result, exact, outputs, "")
    positions = gradient_inputs(contract, sample)

    def forward_backward() -> tuple[tuple[Tensor, ...], dict[int, Tensor | None]]:
        return differentiate(function, sample, positions, cotangents)

    try:
        if positions:
            _judge(result, exact, *_refusable(forward_backward), "with gradients: ")
    except _Refused as reason:
        result.refused_backward, positions = str(reason), ()
    for repeat in range(_REPEATS):
        outputs = forward()
        grads = forward_backward()[1] if positions else {}
        if repeat == _REPEATS - 1:
            _judge(result, exact, outputs, grads, "on tape: ")
    if not result.refused_backward:
        with suppress(NotApplicable):  # the call has no raw op
            for call in raw_calls(contract, function, sample):
                _launch_guarded(call, problem.offset, device, result)
    for i, (old, now) in enumerate(zip(before, memory, strict=True)):
        if not torch.equal(old, now):
            first_byte = int((old != now).nonzero()[0])
            result.details.append(
                f"memory {i} of the inputs, or beside them, was written to: first at byte {first_byte}"
            )


def _refusable(call: Callable[[], Any]) -> Any:
    """Return what `call` returns.  Raises _Refused where a check or planning refuses; any other `BackendError` is a
    kernel that failed to compile, load or launch.
    """
    try:
        return call()
    except InputError as reason:
        raise _Refused(f"InputError: {reason}") from reason
    except RefusedError as reason:
        raise _Refused(str(reason)) from reason


def placed(sample: Sample, offset: int, guard: int) -> Sample:
    """Copy `sample` to new memory: each storage `offset` bytes (or one element, if larger) after a boundary, with
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


def _memory(sample: Sample, mutated: Sequence[Tensor]) -> list[Tensor]:
    """The bytes of every storage of a sample, once, but those that the op writes into."""
    left_out = {t.untyped_storage()._cdata for t in mutated}
    storages = {t.untyped_storage()._cdata: t for t in tensors(sample)}
    storages = {key: t for key, t in storages.items() if key not in left_out}
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
    """Judge by the rule of `check`.   rest: gradients, if there are any, and the prefix of faults."""
    if exact is None:
        return
    grads, prefix = rest if len(rest) == 2 else ({}, rest[0])
    if len(outputs) != len(exact.outputs):
        result.details.append(f"{prefix}{len(outputs)} outputs; the reference has {len(exact.outputs)}")
    measures = [standard.judge(ours) for standard, ours in zip(exact.outputs, outputs, strict=False)]
    measures += [exact.gradients[i].judge(grad) for i, grad in grads.items()]
    result.details += [prefix + fault for measure in measures for fault in measure.faults]


def _launch_guarded(call: RawCall, offset: int, device: torch.device, result: EdgeResult) -> None:
    """Launch the implementation itself into outputs that begin `offset` bytes after a boundary."""
    plan = call.plan()
    outs = call.op.allocate(call.args, "meta")
    if plan.launch is None or call.op.compose is not None or not any(o.numel() for o in outs):
        return
    if call.args[0].numel() == 0:  # dispatch computes the reference for empty inputs
        return
    buffers = [
        guarded(tuple(o.shape), o.dtype, device, GUARD, -(-offset // o.element_size()), o.stride()) for o in outs
    ]
    bytes_before = [surroundings(o) for o in buffers]
    plan.launch(tuple(buffers), *call.args, config=plan.config)
    for i, (out, old) in enumerate(zip(buffers, bytes_before, strict=True)):
        for side, was, now in zip(("before", "after"), old, surroundings(out), strict=True):
            if not torch.equal(was, now):
                result.details.append(f"{call.op.key} output {i}: memory {side} the output was overwritten")
