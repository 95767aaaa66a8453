"""How many multiprocessors a kernel that stays on the machine may fill: all, or fewer where a program keeps some free,
for communication that runs beside its products.

One number for the process. It is read as a kernel is launched, so nothing is compiled again; a change makes plans and
taped launches old, which hold the former grid. A captured CUDA graph keeps its grid.
"""

import torch

from tilewright.errors import InputError
from tilewright.generation import GENERATION
from tilewright.hardware.device import device_info

_budget: int | None = None


def usable_sms(device: torch.device | str | int | None = None) -> int:
    """Multiprocessors of `device`, or the budget where that is less: the grid of a persistent kernel."""
    count = device_info(device).sm_count
    return count if _budget is None else min(_budget, count)


def set_sm_budget(count: int | None) -> None:
    """Let persistent kernels fill at most `count` multiprocessors, from 1; None: all.

    Raises InputError for a count below 1, which would launch nothing.
    """
    global _budget
    if count is not None and count < 1:
        raise InputError(f"set_sm_budget({count}): allowed are counts from 1, and None for all multiprocessors.")
    _budget = count
    GENERATION[0] += 1
