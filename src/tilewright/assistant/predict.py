"""Predict what a change will gain, before it is tried.

A change states a bound: the microseconds of a request that it could save if the machine reached its calibrated
ceilings and no host time were left. Committed measurements say which share of such a bound the change really saved, and
with which spread (`shares`). Bound times share is the expected gain, with a range. The low end of the range may lie
below 1: a change can make a model slower. A gain is always that of a whole request (prefill, all decoding steps and the
loop around them), because that is what is timed.

The floor of a module is the time its matrix products and attention take at the measured rates, or, for a module that
has neither, the time to move its inputs, parameters and outputs once. A phase is one call of the model, a prefill or a
decoding step; the time it takes beyond its floors is host time: launches on a GPU, calls of ops from Python on a CPU.
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
_SHORTEST = 0.02  # of a request's time, which remains in any prediction

# Kept changes that leave no host time in a decoding step.
_HOSTLESS = {"cuda": ("static_decode",), "cpu": ("compiled_decode",)}


@dataclass(frozen=True)
class Prediction:
    """Speed-up of a request, old time / new time.

    low, high: the range. because: the arithmetic in words. expected: the most likely value.
    bound_us: microseconds that could be saved at most. now_us: microseconds of the request before the change.
    """

    low: float
    high: float
    because: str
    expected: float | None = None
    bound_us: float | None = None
    now_us: float | None = None


@dataclass
class Roof:
    """All modules of one class in one phase, next to their floor. Times, flops and bytes are per call of the phase."""

    phase: str
    module_class: str
    calls: int
    us: float
    floor_us: float
    flops: int
    bytes: int


def predict(scene: Scene, name: str, saving: Saving, because: str, *, around_us: float = 0.0) -> Prediction:
    """Turn what a change could save into the gain of a request.

    saving: (phase) -> microseconds of one call of that phase. around_us: those of a request outside of its phases.
    """
    bound = around_us + sum(phase.calls * min(saving(phase), phase.wall_us) for phase in phases_now(scene))
    return gain_of(bound, scene.now_us, share_of(name, scene.work.device.type), because)


def gain_of(bound_us: float, now_us: float, share: Share, because: str = "") -> Prediction:
    """The gain of saving a `share` of `bound_us` in a request of `now_us`."""

    def gain(part: float, margin: float) -> float:
        return 1 / max(_SHORTEST, 1 - part * bound_us / now_us + margin)

    ends = [gain(part, margin) for part in (share.low, share.high) for margin in (share.margin, -share.margin)]
    return Prediction(min(ends), max(ends), because, gain(share.middle, 0.0), bound_us, now_us)


def roofline(observation: Observation, ceilings: Ceilings) -> list[Roof]:
    """Every module class of every phase: the time of its own ops, without those of its children, and their floor."""
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
    """Least time of a module's own ops. Element-wise ops of a module with children count 0: they may fuse with those of
    the children.
    """
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
    """Time of `batch` products (M, K) @ (K, N) at the measured rate; 0 (no floor) for a dtype that was not measured.

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
    """Bytes of inputs, parameters and outputs, each moved once."""
    return cost.bytes_ideal_read + cost.bytes_ideal_written


def phases_now(scene: Scene) -> list[Phase]:
    """The observed phases; a decoding step without its host time if a kept change has removed that already."""
    device = scene.work.device.type
    if not any(name in scene.in_force for name in _HOSTLESS.get(device, ())):
        return scene.observation.phases
    return [_without_host(scene, phase) if phase.name == "decode" else phase for phase in scene.observation.phases]


def _without_host(scene: Scene, phase: Phase) -> Phase:
    busy = phase.busy_us if scene.work.device.type == "cuda" else phase.wall_us - host_us(scene, phase)
    idle = None if phase.idle_share is None else 0.0
    return replace(phase, wall_us=min(phase.wall_us, busy), idle_share=idle)


def per_op_us(scene: Scene, phase: Phase) -> float:
    """Overhead of one op, whatever it computes.

    On a GPU: the idle time of the device, which waits for the host, divided by the launches. On a CPU: the time of a
    phase beyond its floors, divided by its ops, in the phase where that is least.
    """
    if scene.work.device.type == "cpu":
        phases = scene.observation.phases
        least = min((host_us(scene, each) / each.kernels for each in phases if each.kernels), default=0.0)
        return min(least, host_us(scene, phase) / phase.kernels) if phase.kernels else 0.0
    if phase.idle_share is None or not phase.kernels:
        return 0.0
    return phase.idle_share * phase.wall_us / phase.kernels


def host_us(scene: Scene, phase: Phase) -> float:
    """Time of one call of a phase beyond the floors of its matrix products and attention."""
    floor = sum(floor_us(cost, scene.ceilings, leaf=False) for cost in phase.costs)
    return max(0.0, phase.wall_us - floor)


def self_us(phase: Phase, costs: Iterable[ModuleCost]) -> float:
    """Time of these modules' own ops in an unprofiled call; a profile, which is slower, says how it is divided."""
    times = {module.path: module.self_us for module in phase.modules}
    return phase.stretch * sum(times.get(cost.path, 0.0) for cost in costs)


def leaves(phase: Phase) -> list[ModuleCost]:
    """Modules without children, of those that ran ops."""
    parents = _parents(phase.costs)
    return [cost for cost in phase.costs if cost.path not in parents and cost.ops]


def _parents(costs: Iterable[ModuleCost]) -> set[str]:
    paths = {cost.path for cost in costs}
    inner = {path for path in paths if path}
    prefixes = {path[:index] for path in inner for index, sign in enumerate(path) if sign == "."}
    return prefixes | ({""} if inner else set())
