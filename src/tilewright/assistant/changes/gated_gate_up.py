"""down(silu(gate(x)) * up(x)) with gate, up and what lies between as one product: `ops.matmul`'s gated epilogue.

Merged gate and up write 2N columns, which the gate reads again to write N. With the rows of both weights interleaved
(gate_0, up_0, gate_1, up_1, ..) a tile of the product holds both halves of its pairs: it gates them while they are in
registers, and N columns are all that is written: at M rows of bf16, 8 * M * N bytes and a launch less.

It rounds less than the model: silu(z_gate) * z_up is one float32 expression, rounded once, where the model rounds
z_gate and z_up to its own dtype first. The accuracy gate holds that against the wider reference, as any other change.

Calls at numbers of rows where this was not measured faster than the product and the gate run these two separately on
the interleaved weights' views, which are what `gate` and `up` have in state_dict. So do calls that need a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright import ops
from tilewright.assistant.changes.groups import Group, Member, interleaved, refusal
from tilewright.assistant.changes.protocol import Risk, Scene, Verdict
from tilewright.assistant.observation.observe import Phase
from tilewright.assistant.predict import Prediction, predict
from tilewright.assistant.workload import Workload
from tilewright.dispatch.bucket import row_bucket
from tilewright.errors import PatchError
from tilewright.models import gated_products, mlps
from tilewright.models.linears import is_ours
from tilewright.models.mlps import GatedMlpRecipe
from tilewright.models.specialise import Recipe, origin, rename_argument, specialise
from tilewright.models.stand_in import NotReplaceable, obstacle


class Gated(NamedTuple):
    """A SwiGLU MLP with two plain linears, by the roles of its children."""

    path: str
    module: nn.Module
    recipe: GatedMlpRecipe

    @property
    def pair(self) -> list[nn.Module]:
        """gate, up."""
        return [getattr(self.module, self.recipe.gate), getattr(self.module, self.recipe.up)]


@dataclass(frozen=True)
class GatedGateUp:
    """One product with a gated epilogue for every SwiGLU MLP whose size was measured faster so."""

    name: str = "gated_gate_up"
    why: str = "The product of gate and up gates its own columns: half of them are written, and none is read again."
    source: str = "CUTLASS example 45, dual GEMM; Shazeer, 'GLU Variants Improve Transformer', 2020"
    risk: Risk = "rounding"
    stage: int = 4
    preparation_s: float = 0.0

    def applies(self, scene: Scene) -> Verdict:
        mlps_found = list(_gated(scene.model))
        if not mlps_found:
            return Verdict(False, "no module computes down(silu(gate(x)) * up(x)) with two linear layers.")
        won = [mlp for mlp in mlps_found if _saved(mlp)]
        if not won:
            return Verdict(False, "the tables of this device have no number of rows at which it was measured faster.")
        for mlp in won:
            if (why := _refusal(mlp, scene.model)) is not None:
                return Verdict(False, why)
        rows = ", ".join(map(str, _saved(won[0])))
        return Verdict(True, f"{len(won)} MLPs such as {won[0].path}, measured faster at M={rows}.")

    def predict(self, scene: Scene) -> Prediction:
        saved_us = {f"{mlp.path}.{mlp.recipe.gate}".lstrip("."): _saved(mlp) for mlp in _gated(scene.model)}

        def saving(phase: Phase) -> float:
            ran = [cost for cost in phase.costs if cost.path in saved_us and cost.matmuls]
            return sum(saved_us[cost.path].get(row_bucket(cost.matmuls[0].m), 0.0) for cost in ran)

        because = "the gated product's row of the tables against those of product and gate."
        return predict(scene, self.name, saving, because)

    def apply(self, model: nn.Module, work: Workload) -> InForce:
        faster = [mlp for mlp in _gated(model) if _saved(mlp)]
        if not faster:
            raise PatchError(f"{self.name}: {type(model).__name__} has no gated MLP whose product was measured faster.")
        for mlp in faster:
            if (why := _refusal(mlp, model)) is not None:
                raise PatchError(f"{self.name}: {why}")
        return InForce(faster)


GATED_GATE_UP = GatedGateUp()


class Interleaved(Member):
    """Every other row of a pair's weight; torch's linear layer where it is called by itself."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Contiguous values: views that run through each other are nothing a file format takes."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in () if keep_vars else self._parameters:
            if (key := prefix + name) in destination:
                destination[key] = destination[key].contiguous()


@dataclass(frozen=True)
class GatedProductRecipe:
    """The MLP on its pair's weight; `separate` is the recipe it had, None for its own forward."""

    gate: str
    down: str
    argument: str
    separate: Recipe | None

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """forward(self, x) -> y: (..., H)."""
        gate, down = self.gate, self.down
        separate: Callable[..., Any] = cls.forward if self.separate is None else self.separate.build(cls)

        def forward(self: nn.Module, x: Tensor) -> Tensor:
            pair: Any = getattr(getattr(self, gate), "tilewright_group", None)  # None: an adapter took its place
            if pair is None or pair.weight is None or torch.is_grad_enabled():
                return separate(self, x)
            weight, bias = pair.weight, pair.bias
            if not is_ours(x, weight, bias, None, gated_products.measured_faster):
                return separate(self, x)
            return getattr(self, down)(ops.matmul(x, weight, trans_b=True, bias=bias, activation="swiglu"))

        return rename_argument(forward, "x", self.argument)


class InForce:
    """MLPs on interleaved weights."""

    def __init__(self, gated: list[Gated]) -> None:
        self._changed: list[tuple[nn.Module, type[nn.Module], Group]] = []
        try:
            for mlp in gated:
                cls_before = type(mlp.module)
                cls, recipe = origin(cls_before)
                fused = GatedProductRecipe(mlp.recipe.gate, mlp.recipe.down, mlp.recipe.argument, recipe)
                specialised = specialise(cls, fused)  # before any weight moves: it is what may refuse
                group = Group(mlp.pair, [Interleaved, Interleaved], interleaved)
                mlp.module.__class__ = specialised
                self._changed.append((mlp.module, cls_before, group))
        except BaseException:  # no memory for another layer: the ones before it go back
            self.undo()
            raise

    @property
    def detail(self) -> str:
        """How many, and their sizes."""
        columns = sorted({2 * group.sizes[0] for *_, group in self._changed})
        return f"{len(self._changed)} MLPs compute {' or '.join(map(str, columns))} columns and gate them at once"

    def undo(self) -> None:
        """Give modules their classes back, and weights their storage, or the merged one they came from.

        Raises PatchError, and changes nothing, where that was done already.
        """
        for *_, group in self._changed:
            group.require_undoable()
        for module, cls_before, group in self._changed:
            module.__class__ = cls_before
            group.separate()


def _gated(model: nn.Module) -> Iterator[Gated]:
    """SwiGLU MLPs of `model`, patched or not, found by what they compute."""
    for path, module in model.named_modules():
        recipe = origin(type(module))[1]
        if recipe is None and not obstacle(module):
            try:
                proposal = mlps.find(module, None)
            except NotReplaceable:
                continue
            recipe = None if proposal is None else proposal.recipe
        if isinstance(recipe, GatedMlpRecipe) and recipe.activation == "silu":
            yield Gated(path, module, recipe)


def _refusal(mlp: Gated, model: nn.Module) -> str | None:
    gate, up = mlp.pair
    if any(m._forward_hooks or m._forward_pre_hooks for m in (gate, up)):
        return f"gate or up of {mlp.path} has hooks, which the product of both would skip."
    merged = getattr(gate, "tilewright_group", None)
    if merged is not None and merged.members == [gate, up]:
        return None  # it was asked when they were merged
    return refusal([gate, up], model)


def _saved(mlp: Gated) -> dict[int, float]:
    """Microseconds won, by number of rows, according to the tables."""
    weight: Tensor = mlp.pair[0].weight  # type: ignore[assignment]
    return gated_products.won(2 * weight.shape[0], weight.shape[1], weight.dtype, weight.device)
