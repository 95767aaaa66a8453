"""Choose how one case is timed: call by call, or as CUDA graphs, and of how many launches.

Two kinds of case go into graphs. Launch-sized cases: only a graph shows their device time. And cases that only
inference runs (a workload without a backward) and that take less than `GRAPH_BELOW_US`: models replay them from graphs,
and the gap that eager launches leave between two kernels, 1 to 2 us, would be a tenth of it. Training steps are
launched eagerly, so a workload with a backward is timed that way from `LAUNCH_SIZED_BYTES` on.
"""

from __future__ import annotations

import math

import torch

from tilewright.bench.graph import MIN_LAUNCHES

LAUNCH_SIZED_BYTES = 8 << 20  # about 2 us of traffic on a datacentre GPU: less than the host needs for a launch
GRAPH_BELOW_US = 40.0
MAX_LAUNCHES = 128
_REPLAY_US = 400.0  # long enough that the graph's start is lost in it


def launch_sized(total_bytes: int, device: torch.device) -> bool:
    """True for so little traffic that only a graph shows the device time."""
    return device.type == "cuda" and total_bytes <= LAUNCH_SIZED_BYTES


def graph_launches(total_bytes: int, predicted_us: float, device: torch.device, *, inference: bool) -> int | None:
    """Launches of one graph of this case; None where it is timed call by call.

    predicted_us: the case's traffic and flops at the ceilings of the run.   inference: it has no backward.
    """
    if launch_sized(total_bytes, device):
        return MAX_LAUNCHES
    if device.type == "cuda" and inference and predicted_us < GRAPH_BELOW_US:
        return max(MIN_LAUNCHES, min(MAX_LAUNCHES, math.ceil(_REPLAY_US / predicted_us)))
    return None
