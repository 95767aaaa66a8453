"""Time launch-sized work as CUDA graphs: many calls in one graph, replayed, without host gaps between them.

A call of 2 us cannot be timed launch by launch: the host needs longer to launch it. Captured `launches` times over
rotating inputs, the replay shows the time of the call inside a graphed model. Before each replay, outside the timed
span, twice the L2 is read, so that even inputs too small to fill the cache are cold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from tilewright.bench.clock import clock_for
from tilewright.bench.statistics import Samples
from tilewright.bench.timing import Call, Plan, lead_for, run_rounds
from tilewright.errors import InputError
from tilewright.hardware import device_info
from tilewright.hardware.graph_capture import captured

MIN_LAUNCHES = 20

ErrorMode = Literal["global", "thread_local"]


def capture(
    call: Call, *, launches: int, device: torch.device | str, error_mode: ErrorMode = "global"
) -> Callable[[], None]:
    """Capture `launches` calls in one CUDA graph and return its replay.

    error_mode: "thread_local" leaves other threads of the process free to allocate and synchronise meanwhile.

    Captures on the current stream if that is a side stream, else on a new one. A backward pass runs on the stream
    of its forward: prepare it on the current side stream, or the capture misses it and fails.
    """
    target = torch.device(device)
    if target.type != "cuda":
        raise InputError(f"capture: CUDA graphs need a CUDA device, got {target}")
    current = torch.cuda.current_stream(target)
    stream = torch.cuda.Stream(target) if current == torch.cuda.default_stream(target) else current
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(3):  # compilation, autotuning and handles must be over before the capture
            call()
    torch.cuda.synchronize(target)
    graph = torch.cuda.CUDAGraph()
    with captured(graph, target, stream=stream, error_mode=error_mode):
        for _ in range(launches):
            call()
    torch.cuda.synchronize(target)
    return graph.replay


def interleave_graphs(
    fns: Mapping[str, Call],
    *,
    device: torch.device | str,
    launches: int = 64,
    rounds: int = 30,
    evict: bool = True,
) -> dict[str, Samples]:
    """Capture every callable `launches` times and time the replays interleaved; microseconds per call.

    evict=True reads twice the L2 before each replay (untimed); False leaves the cache as the last replay left it.
    """
    if launches < MIN_LAUNCHES:
        raise InputError(
            f"interleave_graphs: needs launches >= {MIN_LAUNCHES} to amortise the graph's start, got {launches}"
        )
    replays = {name: capture(fn, launches=launches, device=device) for name, fn in fns.items()}
    return interleave_replays(replays, device=device, launches=launches, rounds=rounds, evict=evict)


def interleave_replays(
    replays: Mapping[str, Call], *, device: torch.device | str, launches: int, rounds: int = 30, evict: bool = True
) -> dict[str, Samples]:
    """Time graphs that `capture` made, interleaved; microseconds per captured call."""
    target = torch.device(device)
    clock = clock_for(target)
    plans = {name: Plan(replay, 1, _replay_lead(replay, target), units=launches) for name, replay in replays.items()}
    return run_rounds(plans, clock, rounds=rounds, before=_eviction(target) if evict else None)


def _replay_lead(replay: Call, device: torch.device) -> float:
    """Device spin that covers the host time of a graph launch, so that the first node never waits for the host."""
    replay()
    torch.cuda.synchronize(device)
    start = time.perf_counter_ns()
    replay()
    host = (time.perf_counter_ns() - start) / 1e3
    torch.cuda.synchronize(device)
    return lead_for(host, device_us=host, calls=1)


def _eviction(device: torch.device) -> Call:
    """Evict the L2 by reading: written lines would cost the sample their write-back."""
    elements = device_info(device).l2_bytes // 2  # of 4 bytes: twice the L2
    buffer = torch.ones(elements, dtype=torch.int32, device=device)
    return lambda: torch.amax(buffer)
