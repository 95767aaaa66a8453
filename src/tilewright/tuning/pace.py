"""Is a problem timed as CUDA graphs?  By the rule of the bench, so that a table is made of the times a report shows."""

from functools import cache

import torch

from tilewright.bench.calibrate import headline
from tilewright.bench.matrix import matrix_rate
from tilewright.bench.pacing import graph_launches
from tilewright.dispatch import Cost


def launches(cost: Cost, dtype: torch.dtype, device: torch.device, *, inference: bool) -> int | None:
    """Launches of one graph; None for calls that are timed one by one.   inference: the workload has no backward."""
    total = cost.bytes_read + cost.bytes_written
    foreseen = 0.0
    if device.type == "cuda" and inference:  # for the others only the bytes count
        foreseen = max(total / _bytes_per_us(device), cost.flops / _flops_per_us(dtype, device))
    return graph_launches(total, foreseen, device, inference=inference)


@cache
def _bytes_per_us(device: torch.device) -> float:
    return headline(device)["read_gb_s"] * 1e3


@cache
def _flops_per_us(dtype: torch.dtype, device: torch.device) -> float:
    return matrix_rate(dtype, device)
