"""Predict what a change will gain, before it is tried.

A change states a bound: the microseconds of a request that it could save if the machine reached its calibrated
ceilings and no host time were left. What changes saved of their bounds in committed measurements, a share with its
spread (`shares`), turns the bound into an expected gain and a range. The low end lies below 1: a change may lose.
Gains speak of a whole request (prefill, all decoding steps and the loop around them), the quantity that is timed.

The floor of a module is the time its matrix products and attention take at the measured rates, or, for one that has
neither, the time to move its inputs, parameters and outputs once. What a phase takes beyond its floors is host time:
launches on a GPU, calls of operations from Python on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod

from tilewright.assistant.observation.cost import ModuleCost
from tilewright.assistant.observation.observe import Observation, Phase
from tilewright.assistant.scene import Scene
from tilewright.assistant.shares import Share, share_of
from tilewright.hardware.ceilings import Ceilings, dtype_bytes

Saving = Callable[[Phase], float]
_SHORTEST = 0.02  # of a request: no prediction leaves less

# Kept changes that leave no host time in a decoding step.
_HOSTLESS = {"cuda": ("static_decode",), "cpu": ("compiled_decode",)}


@dataclass(frozen=True)
class Prediction:
    """Speed-up of a request, old time / new time: a range, what is expected, and the arithmetic in words.

    bound_us: what could be saved of a request of now_us.
    """

    low: float
    high: float
    because: str
    expected: float | None = None
    bound_us: float | None = None
    now_us: float | None = None


@dataclass
class Roof:
    """One class of modules in one phase, against its floor. Times in us per call of the phase."""

    phase: str
    module_class: str
    calls: int
    us: float
    floor_us: float
    flops: int
    bytes: int


def predict(scene: Scene, name: str, saving: Saving, because: str, *, around_us: float = 0.0) -> Prediction:
    """Turn what a change could save per phase call, in us, into the gain of a request.

    around_us: what it could save outside of the phases.
    """
    bound = around_us + sum(phase.calls * min(saving(phase), phase.wall_us) for phase in phases_now(scene))
    return gain_of(bound, scene.now_us, share_of(name, scene.work.device.type), because)


def gain_of(bound_us: float, now_us: float, share: Share, because: str = "") -> Prediction:
    """The gain of saving a `share` of `bound_us` in a request of `now_us`."""

    def gain(part: float, besides: float) -> float:
        return 1 / max(_SHORTEST, 1 - part * bound_us / now_us + besides)

    ends = [gain(part, besides) for part in (share.low, share.high) for besides in (share.margin, -share.margin)]
    return Prediction(min(ends), max(ends), because, gain(share.middle, 0.0), bound_us, now_us)


def roofline(observation: Observation, ceilings: Ceilings) -> list[Roof]:
    """Every module class of every phase: time spent in its own ops, and the floor of those ops."""
    roofs: dict[tuple[str, str], Roof] = {}
    for phase in observation.phases:
        times = {module.path: module for module in phase.modules}
        parents = _parents(phase.costs)
        for cost in phase.costs:
            key = phase.name, cost.module_class
            roof = roofs.setdefault(key, Roof(*key, 0, 0.0, 0.0, 0, 0))
            roof.calls += cost.calls
            roof.us += times[cost.path].self_us * phase.stretch if cost.path in times else 0.0
            roof.floor_us += floor_us(cost, ceilings, leaf=cost.path not in parents)
            roof.flops += cost.flops
            roof.bytes += ideal_bytes(cost) if cost.path not in parents else cost.bytes_eager
    return sorted(roofs.values(), key=lambda roof: -roof.us)


def floor_us(cost: ModuleCost, ceilings: Ceilings, *, leaf: bool) -> float:
    """Least time of a module's own ops. A container's element-wise ops may fuse into its children: 0."""
    compute = sum(matmul_us(ceilings, p.m, p.n, p.k, p.batch, p.dtype) for p in cost.matmuls)
    for a in cost.attentions:
        if a.dtype in ceilings.attention:
            compute += ceilings.attention_us(
                a.batch, a.heads, a.s_q, a.s_kv, a.dim, a.dtype, causal=a.causal, kv_heads=a.kv_heads
            )
    if compute or not leaf:
        return compute
    return ceilings.memory_us(cost.bytes_ideal_read, cost.bytes_ideal_written)


def matmul_us(ceilings: Ceilings, m: int, n: int, k: int, batch: int, dtype: str) -> float:
    """`batch` products (M, K) @ (K, N) at the measured rate; 0 (no floor) for a dtype whose rate was not measured.

    A product smaller than any measured one takes its share of the smallest one's time, or the time to move its operands
    if that is longer.
    """
    if dtype not in ceilings.matmul:
        return 0.0
    grid = ceilings.matmul[dtype]
    share = prod(min(1.0, size / grid[axis][0]) for axis, size in (("m", m), ("n", n), ("k", k)))
    us = ceilings.matmul_us(m, n, k, dtype)
    if share < 1.0:
        item = dtype_bytes(dtype)
        us = min(us, max(share * us, ceilings.memory_us(item * (m * k + k * n), item * m * n)))
    return batch * us


def summary(ceilings: Ceilings) -> dict[str, float]:
    """The largest rates measured: a copy in bytes/s, products in flop/s by dtype. For plots, not for predictions."""
    largest = {"launch_us": ceilings.launch_us}
    curve = ceilings.bandwidth.get("read1_write1") or next(iter(ceilings.bandwidth.values()))
    largest["copy_bytes_per_s"] = max(size / us for size, us in curve) * 1e6
    for dtype, grid in ceilings.matmul.items():
        rates = (
            2 * m * n * k / grid["us"][i][j][h]
            for i, m in enumerate(grid["m"])
            for j, n in enumerate(grid["n"])
            for h, k in enumerate(grid["k"])
        )
        largest[f"matmul_{dtype}_flop_per_s"] = max(rates) * 1e6
    return largest


def ideal_bytes(cost: ModuleCost) -> int:
    """Inputs, parameters and outputs, once."""
    return cost.bytes_ideal_read + cost.bytes_ideal_written


def phases_now(scene: Scene) -> list[Phase]:
    """The observed phases; a decoding step without its host time where a kept change has taken that away."""
    device = scene.work.device.type
    if not any(name in scene.in_force for name in _HOSTLESS.get(device, ())):
        return scene.observation.phases
    return [_without_host(scene, phase) if phase.name == "decode" else phase for phase in scene.observation.phases]


def _without_host(scene: Scene, phase: Phase) -> Phase:
    busy = phase.busy_us if scene.work.device.type == "cuda" else phase.wall_us - host_us(scene, phase)
    idle = None if phase.idle_share is None else 0.0
    return replace(phase, wall_us=min(phase.wall_us, busy), idle_share=idle)


def per_op_us(scene: Scene, phase: Phase) -> float:
    """What one op costs because it is an op.

    On a GPU the host time per launch where the device waits for the host; on a CPU the time of a phase beyond its
    floors, in the phase where that is least.
    """
    if scene.work.device.type == "cpu":
        host = min((host_us(scene, one) / one.kernels for one in scene.observation.phases if one.kernels), default=0.0)
        return min(host, host_us(scene, phase) / phase.kernels) if phase.kernels else 0.0
    if phase.idle_share is None or not phase.kernels:
        return 0.0
    return phase.idle_share * phase.wall_us / phase.kernels


def host_us(scene: Scene, phase: Phase) -> float:
    """Time of one call of a phase beyond the floors of its products and attention."""
    floor = sum(floor_us(cost, scene.ceilings, leaf=False) for cost in phase.costs)
    return max(0.0, phase.wall_us - floor)


def self_us(phase: Phase, costs: Iterable[ModuleCost]) -> float:
    """Unprofiled time spent in the own ops of these modules."""
    times = {module.path: module.self_us for module in phase.modules}
    return phase.stretch * sum(times.get(cost.path, 0.0) for cost in costs)


def leaves(phase: Phase) -> list[ModuleCost]:
    """Modules without children that ran."""
    parents = _parents(phase.costs)
    return [cost for cost in phase.costs if cost.path not in parents and cost.ops]


def _parents(costs: Iterable[ModuleCost]) -> set[str]:
    paths = {cost.path for cost in costs}
    inner = {path for path in paths if path}
    prefixes = {path[:index] for path in inner for index, sign in enumerate(path) if sign == "."}
    return prefixes | ({""} if inner else set())
