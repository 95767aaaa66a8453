"""Measured rows and sizes without one: at how many rows was an op measured, how fast, and what is still to be measured?

`TILEWRIGHT_AUTOTUNE=first_call` measures an op at the first call of a size that no table has.  The question is put
where a plan is first made, so a call that is planned or replayed costs nothing.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn import Parameter

from tilewright.dispatch.recording import recordings
from tilewright.dispatch.replay import transforms
from tilewright.dispatch.tables import table
from tilewright.hardware import device_info
from tilewright.hardware.graph_capture import current_capture
from tilewright.jit.collect import collecting
from tilewright.settings import current

if TYPE_CHECKING:
    from tilewright.dispatch.raw import RawOp
    from tilewright.dispatch.select import Plan

_LARGEST = 20  # log2 of the largest bucket of rows that is looked for
_TUNER = "tilewright.tuning.first_call"
"""A floor above, by its name: the tuner is imported where somebody asks for it."""


def by_rows(
    raw: "RawOp", sizes: Sequence[int], dtype: torch.dtype | str, device: torch.device | str
) -> dict[int, table.Row]:
    """Rows of the tables in force on `device` for calls of `raw` whose bucket is (M, *sizes), by M, a power of two."""
    info, name = device_info(device), str(dtype).removeprefix("torch.")
    rows = {}
    for m in (1 << exponent for exponent in range(_LARGEST + 1)):
        text = raw.bucket_text((m, *sizes))
        row = table.lookup(raw.op, raw.direction, text, name, "default", info)
        if row is not None:
            rows[m] = row
    return rows


def measured_us(plan: "Plan") -> float | None:
    """Device time of what `plan` runs, as its row has it; None where this choice was not measured."""
    choices = () if plan.row is None else plan.row.choices
    return next((choice.us for choice in choices if choice.backend == plan.backend), None)


def is_due(raw: "RawOp", plan: "Plan", device: torch.device) -> bool:
    """Is this plan one that a measurement could improve, and that none has been made for?"""
    if current().autotune != "first_call" or plan.row is not None or plan.numerics != "default":
        return False
    if raw.compose is not None or plan.requested.rstrip("!") == "torch" or not raw.has_kernels(device.type):
        return False
    key = (raw.op, raw.direction, plan.bucket, plan.dtype, plan.numerics)
    if table.lookup(*key, device_info(device)) is not None:  # a row whose choice is refused here
        return False
    return not import_module(_TUNER).was_tried(raw, plan, device)


def measure(raw: "RawOp", plan: "Plan", bucket: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Have the tuner measure this size, on inputs of its own.  Returns whether a table has it now."""
    return import_module(_TUNER).measure(raw, plan, bucket, dtype, device)


def why_not_measured(tensors: Sequence[Any], device: torch.device) -> str | None:
    """Why nothing may be measured in a call with these tensors, in words; None where it may."""
    if any(t is not None and (type(t) not in (Tensor, Parameter) or is_fake(t) or t.is_meta) for t in tensors):
        return "its tensors are not plain ones"
    if torch._C._len_torch_dispatch_stack() or transforms() is not None or collecting() is not None or recordings():
        return "it is traced, transformed or recorded"
    if device.type == "cuda" and current_capture(device) is not None:
        return "a CUDA graph is being captured"
    return None
