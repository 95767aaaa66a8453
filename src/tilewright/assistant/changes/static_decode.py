"""A KV cache that is allocated once, and on a GPU one CUDA-graph replay per token: `generate.attach_generate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from tilewright.assistant.changes.protocol import Risk, Scene, Verdict
from tilewright.assistant.observation.observe import Phase
from tilewright.assistant.predict import Prediction, predict
from tilewright.assistant.workload import Workload
from tilewright.errors import InputError

if TYPE_CHECKING:
    from tilewright.generate import Attachment  # it needs transformers, which a plain module does not


@dataclass(frozen=True)
class StaticDecode:
    """`model.generate` decodes with a static cache; calls it cannot serve go to the original."""

    name: str = "static_decode"
    why: str = (
        "A growing cache is copied for every token, and a decoding step launched op by op waits for its host; "
        "a static cache is written in place, and its step can be recorded once and replayed."
    )
    source: str = (
        "pytorch.org blog 'Accelerating Generative AI with PyTorch II: GPT, Fast'; CUDA programming guide, graphs"
    )
    risk: Risk = "rounding"
    stage: int = 0
    preparation_s: float = 0.0

    def applies(self, scene: Scene) -> Verdict:
        if not scene.work.generates:
            return Verdict(False, "the model does not generate.")
        from tilewright.generate import StaticDecoder

        longest = scene.work.input_ids.shape[1] + scene.work.new_tokens
        try:
            StaticDecoder(scene.model, max_length=longest, batch_size=scene.work.batch)
        except InputError as error:
            return Verdict(False, str(error).splitlines()[0])
        graphs = "with CUDA graphs" if scene.work.device.type == "cuda" else "without graphs, which need a GPU"
        return Verdict(True, f"decoder-only model with a standard cache; {graphs}.")

    def predict(self, scene: Scene) -> Prediction:
        on_gpu = scene.work.device.type == "cuda"

        def saving(phase: Phase) -> float:
            if phase.name != "decode":
                return 0.0
            if on_gpu:
                nodes = (scene.ceilings.launch_graph_us or 0.0) * phase.kernels
                return max(0.0, (phase.idle_share or 0.0) * phase.wall_us - nodes)
            return phase.ops.get("aten::cat", 0.0) * phase.stretch

        if on_gpu:
            because = "the idle time of a decoding step, less the cost of its graph's nodes, and the loop around it."
        else:
            because = "the time of concatenating the cache, and the loop around the steps."
        return predict(scene, self.name, saving, because, around_us=scene.observation.loop_us)

    def apply(self, model: nn.Module, work: Workload) -> Attached:
        return Attached(model)


class Attached:
    """A model whose `generate` is replaced."""

    def __init__(self, model: nn.Module) -> None:
        from tilewright.generate import attach_generate

        self._model = model
        self._attachment: Attachment = attach_generate(model)

    @property
    def detail(self) -> str:
        device = next(self._model.parameters()).device.type
        return "model.generate decodes with a static cache" + (" and CUDA graphs" if device == "cuda" else "")

    def refresh(self) -> None:
        """Drop caches and what was recorded of the model; the next call makes new ones."""
        self._attachment.forget()

    def undo(self) -> None:
        self._attachment.undo()
