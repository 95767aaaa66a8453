"""The number of SMs that a persistent kernel may fill: all, or fewer if concurrent communication needs some.

One number for the process. It is read at launch, so nothing is compiled again. A change invalidates plans and captured
launches, which hold the former grid. A captured CUDA graph keeps its grid.
"""

import torch

from tilewright.errors import InputError
from tilewright.generation import GENERATION
from tilewright.hardware.device import device_info

_budget: int | None = None


def usable_sms(device: torch.device | str | int | None = None) -> int:
    """The SMs of `device`, or the budget if that is less: the grid of a persistent kernel."""
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
