"""An observation small enough to keep: layers that repeat become one row, `model.layers.*.mlp`."""

from __future__ import annotations

import re
from dataclasses import fields, replace

from tilewright.assistant.observation.cost import ModuleCost
from tilewright.assistant.observation.observe import Observation, Phase
from tilewright.assistant.observation.profile import ModuleTime

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def condense(observation: Observation) -> Observation:
    """The same by pattern of path: times, counts and bytes summed, peaks the largest, shapes listed once."""
    return replace(observation, phases=[_phase(phase) for phase in observation.phases])


def pattern(path: str) -> str:
    """`model.layers.3.mlp` -> `model.layers.*.mlp`."""
    return _INDEX.sub("*", path)


def _phase(phase: Phase) -> Phase:
    times: dict[tuple[str, str], ModuleTime] = {}
    for module in phase.modules:
        key = pattern(module.path), module.module_class
        time = times.setdefault(key, ModuleTime(*key))
        time.total_us += module.total_us
        time.self_us += module.self_us
    costs: dict[tuple[str, str], ModuleCost] = {}
    for cost in phase.costs:
        key = pattern(cost.path), cost.module_class
        _add(costs.setdefault(key, ModuleCost(*key)), cost)
    return replace(phase, modules=list(times.values()), costs=list(costs.values()))


def _add(into: ModuleCost, cost: ModuleCost) -> None:
    for item in fields(ModuleCost):
        if item.type == "int" and item.name != "peak_bytes":
            setattr(into, item.name, getattr(into, item.name) + getattr(cost, item.name))
    into.peak_bytes = max(into.peak_bytes, cost.peak_bytes)
    into.matmuls = list(dict.fromkeys([*into.matmuls, *cost.matmuls]))
    into.attentions = list(dict.fromkeys([*into.attentions, *cost.attentions]))
