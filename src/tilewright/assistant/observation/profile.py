"""Time by module and the device's idle share, from one torch.profiler run.

Modules are labelled with `record_function` by hooks. On a GPU a module's time is that of the kernels it launched; on a
CPU it is the time between entering and leaving it. `busy_us` is the union of the kernels' intervals, so kernels that
overlap count once; the device's idle share is 1 - busy_us / wall time of the unprofiled call (the profiler slows the
host, and would invent idle time).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from tilewright.assistant.observation.attribution import around_modules, visible_modules

_LABEL = "tilewright module "  # not "tilewright::", the namespace of our own ops


@dataclass
class ModuleTime:
    """Time of one module over one forward, in us: `self_us` without its children."""

    path: str
    module_class: str
    total_us: float = 0.0
    self_us: float = 0.0


@dataclass
class Profile:
    """One profiled call.

    busy_us: union of kernel intervals on a GPU, time inside the call on a CPU.
    kernels: launches on a GPU, top-level aten calls on a CPU. ops: the ten longest kernels or aten ops, name -> us.
    """

    busy_us: float
    kernels: int
    modules: list[ModuleTime] = field(default_factory=list)
    ops: dict[str, float] = field(default_factory=dict)


def profile_modules(model: nn.Module, run: Callable[[], object], device: torch.device) -> Profile:
    """Profile one `run()` after one warm-up under the profiler (its first call pays for its own set-up)."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    classes = {path: type(module).__name__ for path, module in visible_modules(model)}

    def labelled(path: str, _: nn.Module) -> Any:
        return record_function(_LABEL + path)

    with torch.no_grad(), around_modules(model, labelled):
        for _ in range(2):
            with profile(activities=activities, acc_events=True) as profiler:
                run()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
    events = profiler.events() or []
    return _on_gpu(events, classes) if device.type == "cuda" else _on_cpu(events, classes)


def union_us(intervals: Iterable[tuple[float, float]]) -> float:
    """Total length of the union of [start, end) intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _on_gpu(events: Iterable[Any], classes: dict[str, str]) -> Profile:
    events = list(events)
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not _is_label(e) and not e.is_user_annotation]
    modules = {path: ModuleTime(path, name) for path, name in classes.items()}
    for event in events:
        if event.device_type != DeviceType.CPU:
            continue
        # A label's own kernels count too (compiled code launches without an aten op), its shadow on the device time
        # line does not.
        us = sum(kernel.duration for kernel in event.kernels if not kernel.name.startswith(_LABEL))
        if us:
            for depth, path in enumerate(_enclosing(event)):
                modules[path].total_us += us
                modules[path].self_us += us if depth == 0 else 0.0
    longest: Counter[str] = Counter()
    for event in kernels:
        longest[event.name] += event.time_range.end - event.time_range.start
    busy = union_us((event.time_range.start, event.time_range.end) for event in kernels)
    return Profile(busy, len(kernels), _seen(modules), dict(longest.most_common(10)))


def _on_cpu(events: Iterable[Any], classes: dict[str, str]) -> Profile:
    modules = {path: ModuleTime(path, name) for path, name in classes.items()}
    longest: Counter[str] = Counter()
    calls, top = 0, 0.0
    for event in events:
        us = event.time_range.end - event.time_range.start
        if not _is_label(event):
            if event.cpu_parent is None or _is_label(event.cpu_parent):
                calls += 1
            longest[event.name] += event.self_cpu_time_total
            continue
        modules[_path(event)].total_us += us
        modules[_path(event)].self_us += us
        outer = next(_enclosing(event.cpu_parent), None) if event.cpu_parent is not None else None
        if outer is None:
            top += us
        else:
            modules[outer].self_us -= us
    return Profile(top, calls, _seen(modules), dict(longest.most_common(10)))


def _enclosing(event: Any) -> Iterator[str]:
    """Paths of the module calls around `event`, innermost first, itself included."""
    while event is not None:
        if _is_label(event):
            yield _path(event)
        event = event.cpu_parent


def _is_label(event: Any) -> bool:
    return event.name.startswith(_LABEL)


def _path(event: Any) -> str:
    return event.name.removeprefix(_LABEL)


def _seen(modules: dict[str, ModuleTime]) -> list[ModuleTime]:
    return [time for time in modules.values() if time.total_us > 0]
