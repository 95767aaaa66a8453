"""A decoding step compiled as one graph, on a CPU: `generate.compiled`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from tilewright.assistant.changes.protocol import Risk, Scene, Verdict
from tilewright.assistant.changes.regional_compile import cxx
from tilewright.assistant.observation.observe import Phase
from tilewright.assistant.predict import Prediction, host_us, predict
from tilewright.assistant.workload import Workload
from tilewright.errors import InputError

if TYPE_CHECKING:
    from tilewright.generate.hook import Attachment  # it needs transformers, which a plain module does not


@dataclass(frozen=True)
class CompiledDecode:
    """`model.generate` decodes with a static cache and a compiled step."""

    name: str = "compiled_decode"
    why: str = (
        "A decoding step of a small model is hundreds of operations that each wait for Python; compiled, it is its "
        "matrix products with one fused kernel between each two."
    )
    source: str = "pytorch.org blog 'Accelerating Generative AI with PyTorch II: GPT, Fast'"
    risk: Risk = "rounding"
    stage: int = 5
    preparation_s: float = 30.0  # one core, 5 blocks, empty cache: 21 s of CPU time, and 8 s again on the model

    def applies(self, scene: Scene) -> Verdict:
        if not scene.work.generates:
            return Verdict(False, "the model does not generate.")
        if scene.work.device.type != "cpu":
            return Verdict(False, "on a GPU static_decode replays the step as a CUDA graph.")
        if cxx() is None:
            return Verdict(
                False, "there is no C++ compiler (g++), which Inductor needs on a CPU. Install g++ or set CXX."
            )
        from tilewright.generate import StaticDecoder

        longest = scene.work.input_ids.shape[1] + scene.work.new_tokens
        try:
            StaticDecoder(scene.model, max_length=longest, batch_size=scene.work.batch)
        except InputError as error:
            return Verdict(False, str(error).splitlines()[0])
        return Verdict(True, "decoder-only model with a standard cache, and a C++ compiler.")

    def predict(self, scene: Scene) -> Prediction:
        def saving(phase: Phase) -> float:
            return host_us(scene, phase) if phase.name == "decode" else 0.0

        around = 0.0 if "static_decode" in scene.in_force else scene.observation.loop_us
        because = "the time of a decoding step beyond its matrix products and attention, and the loop around it."
        return predict(scene, self.name, saving, because, around_us=around)

    def apply(self, model: nn.Module, work: Workload) -> Attached:
        return Attached(model)


class Attached:
    """A model whose `generate` decodes with a compiled step."""

    detail = "model.generate decodes with a static cache and a compiled step"

    def __init__(self, model: nn.Module) -> None:
        from tilewright.generate.compiled import attach_compiled

        self._model = model
        self._attachment: Attachment = attach_compiled(model)

    def refresh(self) -> None:
        """Drop caches and what was recorded of the model; the next call makes new ones."""
        self._attachment.forget()

    def undo(self) -> None:
        self._attachment.undo()
