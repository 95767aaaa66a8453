"""One matrix product instead of several that read the same input: Q, K and V; gate and up.

The merged weight owns the storage, (N_1 + N_2 + .., K), and each old weight becomes a view of its rows. So nothing is
stored twice, state_dict has the same keys and values, in-place updates and load_state_dict reach the merged weight, and
undo gives each weight its own storage back. The first projection to be called computes all outputs and leaves the
others' columns for them; they take them if they are asked about that very input.

Groups are found by behaviour: linear layers of one parent that were handed the same tensor, unchanged, in one forward.
With gradients enabled the projections run one by one: views of one weight would give autograd nothing to attach to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.assistant.changes.protocol import Risk, Scene, Verdict
from tilewright.assistant.observation.observe import Phase
from tilewright.assistant.predict import Prediction, matmul_us, per_op_us, predict
from tilewright.assistant.workload import Workload
from tilewright.errors import PatchError

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

        def saving(phase: Phase) -> tuple[float, float]:
            products = {cost.path: cost.matmuls for cost in phase.costs}
            saved = 0.0
            for group in groups:
                shapes = [products[path][0] for path in group if products.get(path)]
                if len(shapes) < 2:
                    continue
                first, columns = shapes[0], sum(p.n for p in shapes)
                apart = sum(matmul_us(scene.ceilings, p.m, p.n, p.k, 1, p.dtype) for p in shapes)
                saved += (
                    apart
                    - matmul_us(scene.ceilings, first.m, columns, first.k, 1, first.dtype)
                    + per_op_us(phase) * (len(shapes) - 1)
                )
            return min(0.0, saved), max(0.0, saved)

        return predict(
            scene.seen, saving, "separate against merged products at the rates measured here, and the launches that go."
        )

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
        return Merged([Group(group) for group in groups])

    def _groups(self, model: nn.Module, work: Workload) -> list[Paths]:
        return [group for group in shared_inputs(model, lambda: work.prefill(model)) if len(group) in self.members]


class Group:
    """Linear layers that compute together. `weight` is None while their devices or dtypes differ, as during `.to`."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        self.members = [cast(_Member, member) for member in members]
        self.sizes = [member.out_features for member in self.members]
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.input: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()
        for at, member in enumerate(self.members):
            member.__class__ = First if at == 0 else Other
            member.tilewright_group = self
            member.tilewright_at = at
        self.join()

    def join(self) -> None:
        """Make one storage of the members' weights, and one of their biases, and the old ones views of it."""
        if self.weight is not None and all(_shares(member.weight, self.weight) for member in self.members):
            return
        self.weight = self.bias = None
        kinds = {(member.weight.dtype, member.weight.device) for member in self.members}
        if len(kinds) > 1:
            return
        with torch.inference_mode(False), torch.no_grad():
            self.weight = _join([member.weight for member in self.members])
            if self.members[0].bias is not None:
                self.bias = _join([member.bias for member in self.members])

    def separate(self) -> None:
        """Each member is an nn.Linear with its own storage again."""
        with torch.inference_mode(False), torch.no_grad():
            for member in self.members:
                for parameter in member.parameters(recurse=False):
                    parameter.data = parameter.data.clone()
                del member.tilewright_group, member.tilewright_at
                cast(nn.Module, member).__class__ = nn.Linear


class _Member(nn.Linear):
    """A linear layer in a group; joins again whenever its parameters may have been replaced."""

    tilewright_group: Group
    tilewright_at: int

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        moved = super()._apply(fn, recurse)
        self.tilewright_group.join()
        return moved

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.tilewright_group.join()


class First(_Member):
    """Computes the whole group."""

    def forward(self, input: Tensor) -> Tensor:
        group = self.tilewright_group
        if group.weight is None or torch.is_grad_enabled():
            return F.linear(input, self.weight, self.bias)
        parts = F.linear(input, group.weight, group.bias).split(group.sizes, dim=-1)
        group.input, group.parts = input, parts
        return parts[0]


class Other(_Member):
    """Takes its columns if they belong to this input, else computes them. The last one to take clears the table."""

    def forward(self, input: Tensor) -> Tensor:
        group, at = self.tilewright_group, self.tilewright_at
        if group.input is not input:
            return F.linear(input, self.weight, self.bias)
        part = group.parts[at]
        if at == len(group.sizes) - 1:
            group.input, group.parts = None, ()
        return part


class Merged:
    """Groups in force."""

    def __init__(self, groups: list[Group]) -> None:
        self._groups = groups

    @property
    def detail(self) -> str:
        sizes = Counter(" + ".join(map(str, group.sizes)) for group in self._groups)
        return ", ".join(f"merged {count} x ({columns}) output columns" for columns, count in sizes.items())

    def undo(self) -> None:
        for group in self._groups:
            group.separate()


def shared_inputs(model: nn.Module, run: Callable[[], object]) -> list[Paths]:
    """Paths of linear layers of one parent that one `run()` hands the same unchanged tensor, each once."""
    seen: dict[tuple[str, int, int], list[str]] = {}
    held: list[Tensor] = []  # keeps every input alive, so that no id is used twice
    calls: Counter[str] = Counter()

    def watch(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any) -> None:
            calls[path] += 1
            if args and isinstance(args[0], Tensor) and not args[0].is_inference():
                held.append(args[0])
                seen.setdefault((path.rpartition(".")[0], id(args[0]), args[0]._version), []).append(path)

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
    return [tuple(paths) for paths in seen.values() if len(paths) > 1 and all(calls[path] == 1 for path in paths)]


def refusal(group: Sequence[nn.Module], model: nn.Module) -> str | None:
    """Why these layers cannot be merged; None when they can."""
    for member in group:
        if type(member) is not nn.Linear:
            return f"a projection is a {type(member).__name__}, not a plain nn.Linear: its weight is its own affair."
        if type(member.weight.data) is not Tensor or not member.weight.is_floating_point():
            return (
                f"a projection's weight is a {type(member.weight.data).__name__}, {member.weight.dtype}: no plain rows."
            )
    if len({(member.weight.dtype, member.weight.device, member.bias is None) for member in group}) > 1:
        return "the projections of a group differ in dtype, device or in having a bias."
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    if any(owners[id(p)] > 1 for member in group for p in member.parameters(recurse=False)):
        return "a projection's weight is tied to another module; moving its storage would break the tie."
    return None


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _join(parameters: Sequence[Any]) -> Tensor:
    merged = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, merged.split([p.shape[0] for p in parameters]), strict=True):
        parameter.data = part
    return merged


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
