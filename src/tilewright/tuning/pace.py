"""Choose how a problem is timed, by the rule of the bench, so that tables hold the times that reports show."""

from functools import cache

import torch

from tilewright.bench.calibrate import headline
from tilewright.bench.matrix import matrix_rate
from tilewright.bench.pacing import graph_launches
from tilewright.dispatch import Cost


def launches(cost: Cost, dtype: torch.dtype, device: torch.device, *, inference: bool) -> int | None:
    """Launches of one CUDA graph; None where calls are timed one by one.   inference: the workload has no backward."""
    total = cost.bytes_read + cost.bytes_written
    foreseen = 0.0
    if device.type == "cuda" and inference:  # elsewhere the rule reads the bytes alone
        foreseen = foreseen_us(cost, dtype, device)
    return graph_launches(total, foreseen, device, inference=inference)


def foreseen_us(cost: Cost, dtype: torch.dtype, device: torch.device) -> float:
    """The time of the bytes or of the flops alone, whichever is longer, at rates measured here."""
    compute = cost.flops / _flops_per_us(dtype, device) if cost.flops else 0.0
    return max((cost.bytes_read + cost.bytes_written) / _bytes_per_us(device), compute)


@cache
def _bytes_per_us(device: torch.device) -> float:
    return headline(device)["read_gb_s"] * 1e3


@cache
def _flops_per_us(dtype: torch.dtype, device: torch.device) -> float:
    return matrix_rate(dtype, device)
