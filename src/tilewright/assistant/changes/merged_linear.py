"""One matrix product instead of several that read the same input: Q, K and V; gate and up.

Their weights move into one storage (`groups`). The first projection to be called computes all outputs and leaves the
others' columns for them; they take them if they are asked about that very input. The product is `ops.matmul` where that
was measured faster for the merged size, else cuBLAS (`models.linears`).

Groups are found by behaviour: linear layers of one parent that were handed the same tensor, unchanged, in one forward.
With gradients enabled the projections run one by one: views of one weight would give autograd nothing to attach to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.assistant.changes.groups import Group, Member, below_each_other, refusal
from tilewright.assistant.changes.protocol import Risk, Scene, Verdict
from tilewright.assistant.observation.observe import Phase
from tilewright.assistant.predict import Prediction, matmul_us, per_op_us, predict
from tilewright.assistant.workload import Workload
from tilewright.errors import PatchError
from tilewright.models.linears import linear

Paths = tuple[str, ...]


@dataclass(frozen=True)
class MergedLinear:
    """Merge every group of linear layers whose size lies in `members`."""

    name: str
    why: str
    source: str
    members: range
    risk: Risk = "rounding"
    stage: int = 3
    preparation_s: float = 0.0

    def applies(self, scene: Scene) -> Verdict:
        groups = self._groups(scene.model, scene.work)
        if not groups:
            return Verdict(False, f"no {self.members.start} linear layers of one parent read the same tensor.")
        refusals = [
            why
            for group in groups
            if (why := refusal([scene.model.get_submodule(path) for path in group], scene.model)) is not None
        ]
        if refusals:
            return Verdict(False, refusals[0])
        return Verdict(True, f"{len(groups)} groups such as {', '.join(groups[0])}.")

    def predict(self, scene: Scene) -> Prediction:
        groups = self._groups(scene.model, scene.work)

        def saving(phase: Phase) -> float:
            products = {cost.path: cost.matmuls for cost in phase.costs}
            saved = 0.0
            for group in groups:
                shapes = [products[path][0] for path in group if products.get(path)]
                if len(shapes) < 2:
                    continue
                first, columns = shapes[0], sum(p.n for p in shapes)
                separate_us = sum(matmul_us(scene.ceilings, p.m, p.n, p.k, 1, p.dtype) for p in shapes)
                saved += (
                    separate_us
                    - matmul_us(scene.ceilings, first.m, columns, first.k, 1, first.dtype)
                    + per_op_us(scene, phase) * (len(shapes) - 1)
                )
            return saved

        because = "separate against merged products at the rates measured here, and the launches that go."
        return predict(scene, self.name, saving, because)

    def apply(self, model: nn.Module, work: Workload) -> Merged:
        groups = [[model.get_submodule(path) for path in paths] for paths in self._groups(model, work)]
        for group in groups:
            why = refusal(group, model)
            if why is not None:
                raise PatchError(f"{self.name}: {why}")
        if not groups:
            raise PatchError(
                f"{self.name}: {type(model).__name__} has no group of linear layers that read the same tensor."
            )
        return Merged(groups)

    def _groups(self, model: nn.Module, work: Workload) -> list[Paths]:
        return [group for group in shared_inputs(model, lambda: work.prefill(model)) if len(group) in self.members]


class First(Member):
    """Computes the whole group."""

    def forward(self, input: Tensor) -> Tensor:
        group = self.tilewright_group
        if group.weight is None or torch.is_grad_enabled():
            return F.linear(input, self.weight, self.bias)
        parts = linear(input, group.weight, group.bias).split(group.sizes, dim=-1)
        group.input, group.parts = input, parts
        return parts[0]


class Other(Member):
    """Takes its columns if they belong to this input, else computes them. The last one to take clears the table."""

    def forward(self, input: Tensor) -> Tensor:
        group, index = self.tilewright_group, self.tilewright_at
        if group.input is not input:
            return F.linear(input, self.weight, self.bias)
        part = group.parts[index]
        if index == len(group.sizes) - 1:
            group.input, group.parts = None, ()
        return part


class Merged:
    """Groups in force."""

    def __init__(self, layers: Sequence[Sequence[nn.Module]]) -> None:
        self._groups: list[Group] = []
        try:
            for members in layers:
                classes = [First, *[Other] * (len(members) - 1)]
                self._groups.append(Group(members, classes, below_each_other))
        except BaseException:  # no memory for another group: the ones before it go back
            self.undo()
            raise

    @property
    def detail(self) -> str:
        sizes = Counter(" + ".join(map(str, group.sizes)) for group in self._groups)
        return ", ".join(f"merged {count} x ({columns}) output columns" for columns, count in sizes.items())

    def undo(self) -> None:
        for group in self._groups:
            group.require_undoable()
        for group in self._groups:
            group.separate()


def shared_inputs(model: nn.Module, run: Callable[[], object]) -> list[Paths]:
    """Paths of linear layers of one parent that one `run()` hands the same unchanged tensor, each once."""
    readers: dict[tuple[str, int, int], list[str]] = {}
    held: list[Tensor] = []  # keeps every input alive, so that no id is used twice
    calls: Counter[str] = Counter()

    def watch(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any) -> None:
            calls[path] += 1
            if args and isinstance(args[0], Tensor) and not args[0].is_inference():
                held.append(args[0])
                readers.setdefault((path.rpartition(".")[0], id(args[0]), args[0]._version), []).append(path)

        return hook

    linear_like = [
        (path, m) for path, m in model.named_modules() if hasattr(m, "in_features") and hasattr(m, "out_features")
    ]
    handles = [module.register_forward_pre_hook(watch(path)) for path, module in linear_like]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return [tuple(paths) for paths in readers.values() if len(paths) > 1 and all(calls[path] == 1 for path in paths)]


MERGED_QKV = MergedLinear(
    name="merged_qkv",
    why="Q, K and V read the same input: one product reads it once and is one launch instead of three.",
    source="FasterTransformer and Megatron-LM fused QKV; vLLM QKVParallelLinear",
    members=range(3, 9),
)

MERGED_GATE_UP = MergedLinear(
    name="merged_gate_up",
    why="Gate and up read the same input: one product reads it once and is one launch instead of two.",
    source="vLLM MergedColumnParallelLinear",
    members=range(2, 3),
)
