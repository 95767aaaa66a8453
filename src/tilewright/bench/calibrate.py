"""Measure the ceilings of this machine, and how well they predict shapes that were not measured.

Sizes lie on a log grid. Launch-sized points are timed as CUDA graphs over rotating buffers with an evicted cache, all
others as batches; on a CPU by the wall clock. The last step times shapes between the grid points and reports the
median error of the predictions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
import torch.nn.functional as F

from tilewright.bench.bandwidth import stream_calls
from tilewright.bench.graph import interleave_graphs
from tilewright.bench.rotation import rotate, sets_for
from tilewright.bench.timing import interleave
from tilewright.hardware import device_info
from tilewright.hardware.ceilings import MIXES, Ceilings, Curve, driver_version, dtype_name, save
from tilewright.hardware.other_load import OtherLoad

Call = Callable[[], object]
Progress = Callable[[str], None]

KIB, MIB = 1 << 10, 1 << 20
_LAUNCHES = 64  # calls in one graph, each on its own input


@dataclass(frozen=True)
class Grid:
    """The sizes to measure: traffic in bytes, matrices, attention lengths and head dims; `held_*` test predictions."""

    traffic: tuple[int, ...]
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    s: tuple[int, ...]
    d: tuple[int, ...]
    attention_dtype: torch.dtype
    heads: int
    rounds: int
    held_traffic: tuple[int, ...]
    held_matmul: tuple[tuple[int, int, int], ...]
    held_s: tuple[int, ...]


_HALF = (torch.bfloat16, torch.float16)
GPU = Grid(
    traffic=tuple(16 * KIB << i for i in range(17)),  # 16 KiB .. 1 GiB
    # dense where a product turns from memory-bound to compute-bound
    m=(1, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384),
    n=(512, 2048, 8192, 32768),
    k=(512, 2048, 8192),
    dtypes=(*_HALF, torch.float32),
    s=(512, 1024, 2048, 4096, 8192),
    d=(64, 128),
    attention_dtype=torch.bfloat16,
    heads=16,
    rounds=9,
    held_traffic=(96 * KIB, 3 * MIB, 24 * MIB, 96 * MIB, 400 * MIB),
    held_matmul=(
        (1, 4096, 4096),
        (48, 6144, 4096),
        (200, 4096, 1536),
        (2048, 4096, 4096),
        (2048, 14336, 4096),
        (6000, 3072, 3072),
    ),
    held_s=(768, 1536, 3072, 6144),
)
GPU_QUICK = replace(
    GPU,
    traffic=tuple(64 * KIB << (2 * i) for i in range(8)),
    m=(1, 32, 128, 512, 4096),
    n=(1024, 8192),
    k=(1024, 8192),
    dtypes=(torch.bfloat16, torch.float32),
    s=(1024, 4096),
    d=(128,),
    rounds=7,
    held_s=(2048,),
)
CPU = Grid(
    traffic=tuple(64 * KIB << (2 * i) for i in range(6)),  # 64 KiB .. 64 MiB
    m=(1, 16, 128, 512),
    n=(256, 1024, 2048),
    k=(256, 768, 2048),
    dtypes=(torch.float32, torch.bfloat16),
    s=(128, 512, 1024),
    d=(64,),
    attention_dtype=torch.float32,
    heads=4,
    rounds=5,
    held_traffic=(512 * KIB, 8 * MIB, 24 * MIB),
    held_matmul=((1, 768, 768), (64, 768, 512), (256, 512, 1536), (512, 1536, 512)),
    held_s=(256, 768),
)
CPU_QUICK = replace(
    CPU,
    traffic=(64 * KIB, MIB, 8 * MIB, 32 * MIB),
    m=(1, 32, 512),
    n=(256, 1024),
    k=(256, 1024),
    s=(128, 512),
    rounds=3,
    held_traffic=(512 * KIB, 16 * MIB),
    held_matmul=((1, 512, 512), (128, 512, 512)),
    held_s=(256,),
)


def calibrate(
    device: torch.device | str, *, quick: bool = False, progress: Progress | None = None, keep: bool = True
) -> Ceilings:
    """Measure `device` and, with `keep`, store the result in the cache folder.

    About a minute on a GPU and 15 s on two CPU cores; a third of that with `quick` (fewer points, larger errors).
    `progress` gets one line a step; the last lines are the errors on held-out shapes. On a CPU that other processes
    use meanwhile nothing is kept: the next run measures again.
    """
    target = torch.device(device)
    grid = (GPU_QUICK if quick else GPU) if target.type == "cuda" else (CPU_QUICK if quick else CPU)
    say = progress or (lambda line: None)
    info = device_info(target)
    meter = _Meter(target, grid.rounds)
    others = OtherLoad()
    with torch.inference_mode():
        say("launch cost")
        launch, in_graph = meter.launch()
        say(f"bandwidth: {len(MIXES)} mixes x {len(grid.traffic)} sizes")
        bandwidth = {mix: _ascending([[size, meter.traffic(mix, size)] for size in grid.traffic]) for mix in MIXES}
        matmul = {}
        for dtype in grid.dtypes:
            say(f"matmul {dtype_name(dtype)}: {len(grid.m) * len(grid.n) * len(grid.k)} shapes")
            matmul[dtype_name(dtype)] = meter.matmul_grid(grid, dtype)
        say(f"attention {dtype_name(grid.attention_dtype)}: S {grid.s}, D {grid.d}")
        attention = {dtype_name(grid.attention_dtype): meter.attention_grid(grid)}
        ceilings = Ceilings(
            device=info.name,
            arch=info.arch,
            driver=driver_version(target),
            torch_version=torch.__version__,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            tf32=target.type == "cuda" and torch.backends.cuda.matmul.allow_tf32,
            bandwidth=bandwidth,
            matmul=matmul,
            attention=attention,
            launch_us=launch,
            launch_graph_us=in_graph,
            quick=quick,
            threads=None if target.type == "cuda" else torch.get_num_threads(),
        )
        say("held-out shapes")
        ceilings = replace(ceilings, held_out=_held_out(ceilings, meter, grid))
    for kind, error in ceilings.held_out.items():
        say(f"{kind}: median error {error['median_percent']:.1f} % on {error['shapes']:.0f} held-out shapes")
    if keep and target.type == "cpu" and others.busy:
        say(f"other processes used {others.cores():.1f} cores meanwhile: these ceilings are not kept")
    elif keep:
        save(ceilings, target)
    return ceilings


class _Meter:
    """Times one kind of work at one size, cold, with whatever clock suits the device."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device = device
        self.rounds = rounds

    def time(self, calls: dict[str, Call], *, small: bool) -> float:
        """Microseconds of the fastest callable; as graphs where the work is launch-sized.

        The median on a GPU. On a CPU the fastest call within a time budget: other processes only add time, and a
        ceiling is the time without them.
        """
        if self.device.type != "cuda":
            return min(_fastest_call(call, budget_s=0.01 * self.rounds) for call in calls.values())
        if small:
            timed = interleave_graphs(calls, device=self.device, launches=_LAUNCHES, rounds=self.rounds)
        else:
            timed = interleave(calls, device=self.device, rounds=self.rounds, warmup=1)
        return min(samples.median for samples in timed.values())

    def launch(self) -> tuple[float, float | None]:
        """Microseconds of a kernel of one element: (eager back to back, as a node of a graph)."""
        cell = torch.zeros(1, device=self.device)
        calls: dict[str, Call] = {"add": lambda: cell.add_(1)}
        eager = interleave(calls, device=self.device, rounds=3 * self.rounds, measure="wall", sample_us=1000)[
            "add"
        ].median
        if self.device.type != "cuda":
            return eager, None
        return eager, interleave_graphs(calls, device=self.device, launches=200, rounds=3 * self.rounds)["add"].median

    def traffic(self, mix: str, size: int) -> float:
        # Graphs evict the cache between replays; a CPU cannot
        at_most = _LAUNCHES if self.device.type == "cuda" else 1024
        sets = sets_for(size, self.device, at_most=at_most)
        return self.time(stream_calls(mix, size, self.device, sets=sets), small=size <= 16 * MIB)

    def matmul(self, m: int, n: int, k: int, dtype: torch.dtype) -> float:
        count = sets_for((m * k + n * k + m * n) * dtype.itemsize, self.device, at_most=_LAUNCHES)
        pairs = [(self._random((m, k), dtype), self._random((n, k), dtype)) for _ in range(count)]
        calls = [_linear(x, w) for x, w in pairs]
        return self.time({"linear": rotate(calls)}, small=m * n * k <= 1 << 31)

    def matmul_grid(self, grid: Grid, dtype: torch.dtype) -> dict[str, Any]:
        us = [[[self.matmul(m, n, k, dtype) for k in grid.k] for n in grid.n] for m in grid.m]
        return {"m": list(grid.m), "n": list(grid.n), "k": list(grid.k), "us": us}

    def attention(self, s: int, d: int, causal: bool, grid: Grid) -> float:
        q, k, v = (self._random((1, grid.heads, s, d), grid.attention_dtype) for _ in range(3))
        return self.time({"sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)}, small=s <= 1024)

    def attention_grid(self, grid: Grid) -> dict[str, Any]:
        curves = {
            name: {str(d): _ascending([[s, self.attention(s, d, causal, grid)] for s in grid.s]) for d in grid.d}
            for name, causal in (("causal", True), ("full", False))
        }
        return {"batch": 1, "heads": grid.heads, **curves}

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype)


def headline(device: torch.device | str) -> dict[str, float]:
    """Measure the main ceilings in a second, for the machine block of a run.

    Bandwidth in GB/s of each mix at a size far above the cache, launch cost in us.
    """
    target = torch.device(device)
    size = 512 * MIB if target.type == "cuda" else 64 * MIB
    meter = _Meter(target, rounds=7)
    with torch.inference_mode():
        ceilings = {f"{mix}_gb_s": size / meter.traffic(mix, size) / 1e3 for mix in MIXES}
        eager, in_graph = meter.launch()
    ceilings["launch_us"] = eager
    if in_graph is not None:
        ceilings["launch_graph_us"] = in_graph
    return {name: round(value, 3) for name, value in ceilings.items()}


def _fastest_call(call: Call, budget_s: float) -> float:
    """Microseconds of the fastest call within the budget, of at least two after an uncounted first one.

    With one thread it is the CPU time: other processes do not add to it.
    """
    call()
    clock = time.process_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
    fastest, count, began = float("inf"), 0, time.perf_counter_ns()
    while count < 2 or time.perf_counter_ns() - began < budget_s * 1e9:
        start = clock()
        call()
        elapsed = clock() - start
        if elapsed > 0:  # the CPU time of a virtual machine may stand still
            fastest, count = min(fastest, elapsed), count + 1
    return fastest / 1e3


def _linear(x: torch.Tensor, w: torch.Tensor) -> Call:
    return lambda: F.linear(x, w)


def _ascending(curve: Curve) -> Curve:
    """Make a curve ascend despite noise: a smaller size takes at most the time of a larger one."""
    least = float("inf")
    result: Curve = []
    for size, us in reversed(curve):
        least = min(least, us)
        result.append([size, least])
    return result[::-1]


def _held_out(ceilings: Ceilings, meter: _Meter, grid: Grid) -> dict[str, dict[str, float]]:
    """Median absolute error, in percent, of the predictions for shapes between the grid points."""
    memory = [
        _percent(ceilings.memory_us(size * (1 - share), size * share), meter.traffic(mix, size))
        for size in grid.held_traffic
        for mix, share in MIXES.items()
    ]
    matmul = [
        _percent(ceilings.matmul_us(m, n, k, dtype), meter.matmul(m, n, k, dtype))
        for m, n, k in grid.held_matmul
        for dtype in grid.dtypes
    ]
    kind, d = grid.attention_dtype, grid.d[0]
    attention = [
        _percent(
            ceilings.attention_us(1, grid.heads, s, s, d, kind, causal=causal), meter.attention(s, d, causal, grid)
        )
        for s in grid.held_s
        for causal in (True, False)
    ]
    errors = {"memory": memory, "matmul": matmul, "attention": attention}
    return {
        name: {"median_percent": statistics.median(values), "shapes": float(len(values))}
        for name, values in errors.items()
    }


def _percent(predicted: float, measured: float) -> float:
    return 100 * abs(predicted - measured) / measured
