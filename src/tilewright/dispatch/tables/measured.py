"""Questions to the measured tables that are not about one call: at how many rows was an op measured, and how fast?"""

from collections.abc import Sequence

import torch

from tilewright.dispatch.raw import RawOp
from tilewright.dispatch.select import Plan
from tilewright.dispatch.tables import table
from tilewright.hardware import device_info

_LARGEST = 20  # log2 of the largest bucket of rows that is looked for


def by_rows(
    raw: RawOp, sizes: Sequence[int], dtype: torch.dtype | str, device: torch.device | str
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


def measured_us(plan: Plan) -> float | None:
    """Device time of what `plan` runs, as its row has it; None where this choice was not measured."""
    choices = () if plan.row is None else plan.row.choices
    return next((choice.us for choice in choices if choice.backend == plan.backend), None)
