"""Replace norms, gated MLPs, rotary embeddings, residual sums and linears by the library's own ops, module by module,
after a behavioural probe.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from tilewright.assistant.changes.protocol import Risk, Scene, Verdict
from tilewright.assistant.observation.cost import ModuleCost
from tilewright.assistant.observation.observe import Phase
from tilewright.assistant.predict import Prediction, floor_us, leaves, per_op_us, predict, self_us
from tilewright.assistant.workload import Workload
from tilewright.errors import PatchError
from tilewright.models import Patch, linears, patch


@dataclass(frozen=True)
class OpReplacement:
    """`tilewright.patch`; its own verification is left out because the loop's gate is at least as strict."""

    name: str = "op_replacement"
    why: str = (
        "A norm or an activation of several eager ops moves its data several times; one fused kernel moves it once."
    )
    source: str = "tilewright.patch; Hsu et al., 'Liger Kernel', 2024"
    risk: Risk = "rounding"
    stage: int = 2
    preparation_s: float = 0.0

    def applies(self, scene: Scene) -> Verdict:
        try:
            planned = patch(scene.model, verify=False)
        except PatchError as error:
            return Verdict(False, str(error).splitlines()[0])
        planned.undo()
        return Verdict(True, f"replaceable: {_counts(planned)}.")

    def predict(self, scene: Scene) -> Prediction:
        def saving(phase: Phase) -> float:
            several = list(_of_several_ops(phase))
            fused = sum(floor_us(cost, scene.ceilings, leaf=True) for cost in several)
            launches = per_op_us(scene, phase) * sum(cost.ops - cost.calls for cost in several)
            products = sum(_saved(scene.model, cost) for cost in phase.costs if cost.matmuls)
            if scene.work.device.type == "cpu":  # the time of a module holds what its calls cost
                launches = 0.0
            return max(0.0, self_us(phase, several) - fused) + launches + products

        return predict(
            scene,
            self.name,
            saving,
            "modules of several element-wise ops at the memory floor of one, the launches that go, and what products "
            "won over cuBLAS in the tables.",
        )

    def apply(self, model: nn.Module, work: Workload) -> Replaced:
        return Replaced(patch(model, verify=False))


class Replaced:
    """A patch in force."""

    def __init__(self, applied: Patch) -> None:
        self._patch = applied

    @property
    def detail(self) -> str:
        return f"replaced {_counts(self._patch)}"

    def undo(self) -> None:
        self._patch.undo()


def _of_several_ops(phase: Phase) -> Iterable[ModuleCost]:
    return (cost for cost in leaves(phase) if not cost.matmuls and not cost.attentions and cost.ops > cost.calls)


def _saved(model: nn.Module, cost: ModuleCost) -> float:
    """Microseconds that the product of a linear layer was measured faster by."""
    module, product = model.get_submodule(cost.path), cost.matmuls[0]
    if not isinstance(module, nn.Linear):
        return 0.0
    return linears.saved_us(product.m, product.n, product.k, module.weight.dtype, module.weight.device)


def _counts(applied: Patch) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in applied.report().counts().items())
