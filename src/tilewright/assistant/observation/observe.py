"""Observe: what one forward and one decoding step cost, module by module, before anything is changed.

Everything here is measured or counted on the given inputs; nothing is estimated. Wall times come from unprofiled calls,
shares from the profiler.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tilewright.assistant.observation.cost import ModuleCost, count
from tilewright.assistant.observation.graph_breaks import GraphBreaks, graph_breaks
from tilewright.assistant.observation.profile import ModuleTime, profile_modules
from tilewright.assistant.workload import Workload
from tilewright.models.wide import dominant_dtype

Say = Callable[[str], None]


@dataclass
class Phase:
    """One kind of call: "prefill" (the example) or "decode" (one more token). Times in us.

    calls: how many of them one request makes. idle_share: share of the wall time without a kernel, on a GPU; None on a
    CPU.
    costs: flops, bytes and memory by module; empty once modules are compiled (their ops are not visible).
    """

    name: str
    calls: int
    wall_us: float
    busy_us: float
    idle_share: float | None
    kernels: int
    modules: list[ModuleTime]
    ops: dict[str, float]
    peak_bytes: int | None = None
    costs: list[ModuleCost] = field(default_factory=list)

    @property
    def stretch(self) -> float:
        """Wall time over profiled time: what a module's profiled time is multiplied by to add up to the wall time."""
        profiled = max((module.total_us for module in self.modules), default=0.0)
        return self.wall_us / profiled if profiled else 1.0


@dataclass
class Observation:
    """What was seen of one model on one workload. breaks: None where it was not asked for (after changes).

    whole_us: a whole request as `generate` runs it, with its own loop around the phases; 0 where it was not timed.
    """

    parameters: int
    weight_bytes: int
    dtype: str
    phases: list[Phase]
    breaks: GraphBreaks | None = None
    whole_us: float = 0.0

    def phase(self, name: str) -> Phase | None:
        """The phase of this name, if it was observed."""
        return next((phase for phase in self.phases if phase.name == name), None)

    @property
    def request_us(self) -> float:
        """Time of what is optimised: one prefill, every decoding step of a request, and the loop around them."""
        return self.whole_us or sum(phase.calls * phase.wall_us for phase in self.phases)

    @property
    def loop_us(self) -> float:
        """Time of a request outside of its phases."""
        return max(0.0, self.request_us - sum(phase.calls * phase.wall_us for phase in self.phases))


def observe(model: nn.Module, work: Workload, say: Say = lambda line: None, *, count_costs: bool = True) -> Observation:
    """Profile the prefill and (for a language model) a decoding step; count their costs and the graph breaks.

    count_costs=False leaves the counts and the graph breaks out: what can be seen of a model with compiled modules,
    each one unit.
    """
    breaks = None
    if count_costs:
        say("looking for graph breaks")
        breaks = graph_breaks(model, work.prefill)
    calls: list[tuple[str, int, Callable[[], object]]] = [("prefill", 1, lambda: work.prefill(model))]
    step = decode_step(model, work) if work.generates else None
    if step is not None:
        calls.append(("decode", work.new_tokens, step))
    phases = []
    for name, times, run in calls:
        say(f"profiling one {name} call")
        phases.append(_phase(name, times, model, run, work.device))
        if count_costs:
            say(f"counting flops, bytes and memory of one {name} call")
            costs = count(model, run)
            phases[-1].costs, phases[-1].peak_bytes = costs.modules, costs.peak_bytes
    whole_us = 0.0
    if count_costs and work.generates:
        say("timing one request")
        whole_us = wall_us(lambda: work.request(model), work.device, calls=3)
        _fit_steps(phases, whole_us)
    dtype = str(dominant_dtype(model)).removeprefix("torch.")
    return Observation(sum(p.numel() for p in model.parameters()), weight_bytes(model), dtype, phases, breaks, whole_us)


def _fit_steps(phases: list[Phase], whole_us: float) -> None:
    """Shorten a decoding step that was slower by itself than inside a request: a host that waits loses its clocks."""
    prefill, *rest = phases
    for step in rest:
        left = max(0.0, whole_us - prefill.wall_us) / step.calls
        if 0 < left < step.wall_us:
            step.wall_us = left
            if step.idle_share is not None:
                step.idle_share = max(0.0, 1 - step.busy_us / left)


def decode_step(model: nn.Module, work: Workload) -> Callable[[], object] | None:
    """A call that decodes one more token with the model's own growing cache; None if it returns no cache."""
    with torch.no_grad():
        out = model(input_ids=work.input_ids, use_cache=True)
    cache: Any = getattr(out, "past_key_values", None)
    if cache is None:
        return None
    token = out.logits[:, -1:].argmax(-1)
    return lambda: model(input_ids=token, past_key_values=cache, use_cache=True)


def wall_us(run: Callable[[], object], device: torch.device, calls: int = 5) -> float:
    """Median time of a call that is waited for, after one untimed call.

    On a CPU with one thread it is the CPU time, which is the wall time of an idle machine.
    """
    clock = time.process_time_ns if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter_ns
    samples = []
    with torch.no_grad():
        for _ in range(calls + 1):
            _drain(device)
            start = clock()
            run()
            _drain(device)
            samples.append((clock() - start) / 1e3)
    return statistics.median(samples[1:])


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers; storages that several share count once."""
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())
    }
    return sum(storages.values())


def _phase(name: str, calls: int, model: nn.Module, run: Callable[[], object], device: torch.device) -> Phase:
    wall = wall_us(run, device)
    profiled = profile_modules(model, run, device)
    # The profiler slows the host, which adds idle time that is not there without it: the unprofiled wall time is the
    # honest span.
    idle = max(0.0, 1 - profiled.busy_us / wall) if device.type == "cuda" else None
    return Phase(name, calls, wall, profiled.busy_us, idle, profiled.kernels, profiled.modules, profiled.ops)


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
