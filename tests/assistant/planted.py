"""A tiny model, ceilings without a measurement, and changes whose outcome is known in advance."""

import time
from dataclasses import dataclass

import torch
from torch import nn

from tilewright.assistant.changes import Scene, Verdict
from tilewright.assistant.predict import Prediction
from tilewright.assistant.workload import Workload
from tilewright.hardware.ceilings import Ceilings

VOCABULARY = 211
DELAY_S = 0.02


def tiny_llama(**changes) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**settings | changes)).eval()


def prompts(count: int = 2, length: int = 24) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (length + 3 * i,), generator=generator) for i in range(count)]


def ceilings() -> Ceilings:
    """1 us for anything: predictions are about arithmetic here, not about a machine."""
    grid = {"m": [1, 512], "n": [64, 1024], "k": [64, 1024], "us": [[[1.0, 1.0], [1.0, 1.0]]] * 2}
    return Ceilings(
        device="test",
        arch="cpu",
        driver=None,
        torch_version=torch.__version__,
        date="2026-01-01",
        tf32=False,
        bandwidth={mix: [[1e3, 1.0], [1e6, 1.0]] for mix in ("read", "read2_write1", "read1_write1", "write")},
        matmul={"float32": grid},
        attention={"float32": {"batch": 1, "heads": 4, "causal": {"16": [[16, 1.0]]}, "full": {"16": [[16, 1.0]]}}},
        launch_us=1.0,
        launch_graph_us=None,
    )


@dataclass(frozen=True)
class Planted:
    """Each forward takes `delay_s` longer (or less long); logits are off by up to `error`."""

    name: str
    delay_s: float = 0.0
    error: float = 0.0
    stage: int = 0
    preparation_s: float = 0.0
    why: str = "planted"
    source: str = "this test"
    risk: str = "exact"

    def applies(self, scene: Scene) -> Verdict:
        return Verdict(True, "planted")

    def predict(self, scene: Scene) -> Prediction:
        return Prediction(1.0, 2.0, "planted")

    def apply(self, model: nn.Module, work: Workload) -> "PlantedApplied":
        return PlantedApplied(model, self)


class PlantedApplied:
    def __init__(self, model: nn.Module, change: Planted) -> None:
        self.detail = f"planted {change.name}"
        self._model = model
        self._before = model.delay_s
        model.delay_s = self._before + change.delay_s
        self._handle = model.lm_head.register_forward_hook(lambda *call: call[-1] + change.error * _ramp(call[-1]))

    def undo(self) -> None:
        self._handle.remove()
        self._model.delay_s = self._before


def _ramp(logits: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, logits.shape[-1]).expand_as(logits)


def slow_llama(delay_s: float = DELAY_S) -> nn.Module:
    """A tiny Llama whose every forward sleeps `model.delay_s`: a cost that a planted change can take away."""
    model = tiny_llama()
    model.delay_s = delay_s
    model.register_forward_pre_hook(_sleep)
    return model


def _sleep(model: nn.Module, _: object) -> None:
    time.sleep(model.delay_s)
