"""Tune one op at one size inside of a call: what `TILEWRIGHT_AUTOTUNE=first_call` does for sizes that no table has.

It is `tune` with a budget, for the bucket of the call alone: other processes, the tuner's own inputs, the user's table.
"""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Lock, local

import torch

from tilewright.bench.cases import Case
from tilewright.dispatch import Plan, RawOp, contract
from tilewright.dispatch.tables import table
from tilewright.errors import TilewrightError
from tilewright.hardware import device_info
from tilewright.hardware.graph_capture import outside_captures
from tilewright.log import log_once
from tilewright.settings import current
from tilewright.tuning.run import Run, problem_of
from tilewright.tuning.sizes import workload_of

MIN_GAIN = 0.03
_SEARCH = 0.25  # share of the budget for finding the inputs
_STEP_S = 60.0  # the limit of `tune` for one step of one candidate

_Size = tuple[str, ...]
_tried: set[_Size] = set()
"""Sizes that this process has measured, or could not measure."""
_measuring = Lock()  # one size at a time: two would disturb each other's times
_thread = local()  # `.measures`: the tuner's own calls are not measured


def was_tried(raw: RawOp, plan: Plan, device: torch.device) -> bool:
    """Is there nothing more to be had from measuring this size, in this process?"""
    return _size(raw, plan, device) in _tried or getattr(_thread, "measures", False)


def measure(raw: RawOp, plan: Plan, bucket: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Tune the size of `plan`, once in this process.  Returns whether a table has it now.

    Another thread that calls the same size waits for the result.  What goes wrong is logged: the default runs.
    """
    if device.type == "cuda":
        with outside_captures():  # the work that this thread has queued would disturb the times
            torch.cuda.current_stream(device).synchronize()
    with _measuring:
        size = _size(raw, plan, device)
        if size not in _tried:
            table.forget()  # another process may have written since this one read
            try:
                if not _has_row(raw, plan, device):
                    # A thread of its own: no mode, grad state, autocast or preference of the call is in force there
                    with ThreadPoolExecutor(1, initializer=_begin) as pool:
                        pool.submit(_tune, raw, plan, bucket, dtype, device).result()
            finally:
                _tried.add(size)
    return _has_row(raw, plan, device)


def _begin() -> None:
    _thread.measures = True


def _tune(raw: RawOp, plan: Plan, bucket: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    began, budget = time.monotonic(), float(current().autotune_seconds)
    what = f"{raw.key} {plan.bucket} {plan.dtype} on {device_info(device).name}"
    log_once(
        ("first-call", what),
        f"{what}: no table has this size, so its first call measures it, for about {budget:g} s",
        logging.INFO,
    )
    case = _case(raw, bucket, dtype, device, _SEARCH * budget)
    if case is None:
        _failed(what, "no workload of the op was found that has it")
        return
    step = min(_STEP_S, budget)
    try:
        run = Run(device, "random", min_gain=MIN_GAIN, seconds=step, prepare=budget)
        try:
            run.tune(case, problem_of(case, device, run.report.seed), began + budget, lambda step, count, total: None)
        finally:
            run.close()
    except TilewrightError as error:
        _failed(what, str(error))
        return
    for untuned in run.report.untuned:
        _failed(what, untuned.reason, logging.WARNING if untuned.failed else logging.INFO)


def _case(raw: RawOp, bucket: tuple[int, ...], dtype: torch.dtype, device: torch.device, seconds: float) -> Case | None:
    match = workload_of(raw, bucket, dtype, device, seconds)
    return None if match is None else Case(contract(raw.op), *match, "fwd" if raw.direction == "fwd" else "bwd")


def _failed(what: str, reason: str, level: int = logging.WARNING) -> None:
    log_once(("first-call-failed", what), f"{what} was not measured: {reason}. The default runs", level)


def _has_row(raw: RawOp, plan: Plan, device: torch.device) -> bool:
    key = (raw.op, raw.direction, plan.bucket, plan.dtype, plan.numerics)
    return table.lookup(*key, device_info(device)) is not None


def _size(raw: RawOp, plan: Plan, device: torch.device) -> _Size:
    folder = str(current().cache_dir)
    return raw.op, raw.direction, plan.bucket, plan.dtype, device_info(device).name, folder
