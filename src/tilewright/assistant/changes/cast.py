"""Another number format for the whole model: bfloat16 where matrix units make it faster, float32 where the CPU has none
for bfloat16.

A cast changes the values, not only their order: the accuracy gate decides. Parameters keep their identity (`.data` is
exchanged), so ties stay tied. The original tensors stay alive while the cast is in force, and undo puts back those very
tensors. Floating inputs of the model are cast on entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tilewright.assistant.changes.protocol import Risk, Scene, Verdict
from tilewright.assistant.observation.observe import Phase
from tilewright.assistant.predict import Prediction, leaves, matmul_us, predict, self_us
from tilewright.assistant.workload import Workload, device_of
from tilewright.errors import PatchError
from tilewright.models.wide import cast_on_entry, dominant_dtype


@dataclass(frozen=True)
class Cast:
    """All floating parameters from `source_dtype` to `target`."""

    name: str
    why: str
    source: str
    risk: Risk
    source_dtypes: tuple[torch.dtype, ...]
    target: torch.dtype
    devices: tuple[str, ...]
    stage: int = 1
    preparation_s: float = 0.0

    def applies(self, scene: Scene) -> Verdict:
        now = dominant_dtype(scene.model)
        if scene.work.device.type not in self.devices:
            return Verdict(
                False, f"only worth trying on {' or '.join(self.devices)}; the model lies on {scene.work.device.type}."
            )
        if now not in self.source_dtypes:
            return Verdict(
                False, f"the model is {_name(now)} already." if now == self.target else f"the model is {_name(now)}."
            )
        return Verdict(True, f"the model is {_name(now)}.")

    def predict(self, scene: Scene) -> Prediction:
        target = _name(self.target)

        def saving(phase: Phase) -> float:
            saved = 0.0
            for cost in (cost for cost in leaves(phase) if cost.matmuls):
                before, after = (
                    sum(matmul_us(scene.ceilings, p.m, p.n, p.k, p.batch, dtype or p.dtype) for p in cost.matmuls)
                    for dtype in (None, target)
                )
                if before and after:
                    saved += self_us(phase, [cost]) * (1 - after / before)
            return saved

        return predict(
            scene, self.name, saving, f"the matrix products at the {target} rate measured here, all else unchanged."
        )

    def apply(self, model: nn.Module, work: Workload) -> InDtype:
        return InDtype(model, self.source_dtypes, self.target)


class InDtype:
    """A model with parameters in another dtype. Buffers stay: rotary tables and masks carry float32 on purpose."""

    def __init__(self, model: nn.Module, source_dtypes: tuple[torch.dtype, ...], target: torch.dtype) -> None:
        odd = next((p for p in model.parameters() if type(p.data) is not torch.Tensor), None)
        if odd is not None:
            raise PatchError(
                f"cast: a parameter is a {type(odd.data).__name__}, not a plain tensor; its format is its own."
            )
        self._target = target
        self._originals = [(p, p.data) for p in model.parameters() if p.dtype in source_dtypes]

        self._hook = cast_on_entry(model, source_dtypes, target, device_of(model))
        for parameter, original in self._originals:
            parameter.data = original.to(target)

    @property
    def detail(self) -> str:
        return f"{len(self._originals)} parameters are {_name(self._target)}"

    def undo(self) -> None:
        self._hook.remove()
        for parameter, original in self._originals:
            parameter.data = original


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


BF16 = Cast(
    name="bf16",
    why="bfloat16 halves the bytes of weights and activations and runs matrix units at twice the TF32 rate.",
    source="Micikevicius et al., 'Mixed Precision Training', 2017; Kalamkar et al., 'A Study of BFLOAT16', 2019",
    risk="precision",
    source_dtypes=(torch.float32,),
    target=torch.bfloat16,
    devices=("cuda", "cpu"),
)

FP32_ON_CPU = Cast(
    name="fp32_on_cpu",
    why="A CPU without bfloat16 units converts each operand to float32 and back; float32 weights save that work.",
    source="oneDNN documentation, 'Data Types': bfloat16 needs AVX512_BF16 or AMX to be faster than float32",
    risk="precision",
    source_dtypes=(torch.bfloat16, torch.float16),
    target=torch.float32,
    devices=("cpu",),
)
