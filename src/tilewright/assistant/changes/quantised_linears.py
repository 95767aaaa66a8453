"""Linear layers with weights of 4 or 8 bits, judged by perplexity on held-out prompts.

Tried only where `allow=` names them: what they change is more than rounding, and whether it may is the user's choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tilewright.assistant.changes.protocol import Risk, Scene, Verdict
from tilewright.assistant.observation.observe import Phase
from tilewright.assistant.predict import Prediction, leaves, predict, self_us
from tilewright.assistant.workload import Workload
from tilewright.errors import PatchError
from tilewright.models.quantise import Exchange, plain

_BITS = {"int8": 8.125, "fp8": 8.0, "w8a8_int8": 8.0, "mxfp8": 8.25, "int4": 4.125, "mxfp4": 4.25, "nvfp4": 4.5}
_FEW_ROWS = 64  # beyond it a product is not bound by the bytes of its weight


@dataclass(frozen=True)
class QuantisedLinears:
    """`tilewright.quantize_`, with the wide layers kept for undo.

    perplexity_rise: what it may cost, relative, on held-out prompts.
    """

    format: str
    perplexity_rise: float
    source: str
    why: str = (
        "With few rows a linear layer takes the time to read its weight, which has a half to a quarter of the bytes."
    )
    risk: Risk = "precision"
    stage: int = 3
    preparation_s: float = 0.0

    @property
    def name(self) -> str:
        """int4_linears, ..."""
        return f"{self.format}_linears"

    def applies(self, scene: Scene) -> Verdict:
        if not scene.work.held_out:
            return Verdict(False, "its accuracy is judged by perplexity, and there are no held-out prompts.")
        try:
            planned = Exchange(scene.model, self.format)
        except PatchError as error:
            return Verdict(False, str(error).splitlines()[0])
        return Verdict(True, f"{len(planned.linears)} linear layers can have weights in {self.format}.")

    def predict(self, scene: Scene) -> Prediction:
        def saving(phase: Phase) -> float:
            saved = 0.0
            for cost in leaves(phase):
                module = scene.model.get_submodule(cost.path)
                if isinstance(module, nn.Linear) and cost.matmuls and cost.matmuls[0].m <= _FEW_ROWS:
                    left = _BITS[plain(self.format)] / (8 * module.weight.dtype.itemsize)
                    saved += self_us(phase, [cost]) * max(0.0, 1 - left)
            return saved

        return predict(
            scene, self.name, saving, "linear layers of few rows in proportion to the bytes of their weights."
        )

    def apply(self, model: nn.Module, work: Workload) -> Exchanged:
        exchange = Exchange(model, self.format)
        exchange.calibrate(lambda: work.forward(model))
        return Exchanged(exchange, self.format)


class Exchanged:
    """The layers in force."""

    def __init__(self, exchange: Exchange, format: str) -> None:
        self._exchange, self._format = exchange, format
        exchange.apply()

    @property
    def detail(self) -> str:
        return f"{len(self._exchange.linears)} linear layers have weights in {self._format}"

    def undo(self) -> None:
        self._exchange.undo(forget=True)


_QUAROT = "Ashkboos et al., 'QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs', 2024"
QUANTISED = (
    QuantisedLinears("int4", 0.03, "Frantar et al., 'GPTQ', 2022; Lin et al., 'AWQ', 2023"),
    QuantisedLinears("int4_rotated", 0.03, _QUAROT),
    QuantisedLinears("nvfp4", 0.03, "NVIDIA, 'Pretraining Large Language Models with NVFP4', 2025"),
    QuantisedLinears("nvfp4_rotated", 0.03, _QUAROT),
    QuantisedLinears("mxfp4", 0.03, "OCP Microscaling Formats (MX) Specification 1.0, 2023"),
    QuantisedLinears("mxfp4_rotated", 0.03, _QUAROT),
    QuantisedLinears("int8", 0.005, "Dettmers et al., 'LLM.int8()', 2022"),
    QuantisedLinears("int8_rotated", 0.005, _QUAROT),
    QuantisedLinears("fp8", 0.005, "Micikevicius et al., 'FP8 Formats for Deep Learning', 2022"),
    QuantisedLinears("w8a8_int8", 0.005, "Dettmers et al., 'LLM.int8()', 2022"),
    QuantisedLinears("w8a8_int8_smooth", 0.005, "Xiao et al., 'SmoothQuant', 2022"),
    QuantisedLinears("w8a8_int8_rotated", 0.005, _QUAROT),
    QuantisedLinears("mxfp8", 0.005, "OCP Microscaling Formats (MX) Specification 1.0, 2023"),
)
"""The forms of fewest bits first.  The limits are those of the wide model's perplexity."""
