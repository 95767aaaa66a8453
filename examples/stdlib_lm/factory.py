"""The committed model as `tilewright optimize examples/stdlib_lm/factory.py:factory` takes it."""

import json
import runpy
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent


def factory() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The trained model and one held-out prompt as its input, `input_ids` (1, tokens) int64, both on the CPU.

    The weights are widened to float32, so that going to a smaller type is a change to be measured like any other.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    unpack = runpy.run_path(str(HERE / "weights.py"))["unpack"]  # this folder is on no path when a factory is loaded
    folder = unpack(HERE / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with (folder / "prompts.jsonl").open(encoding="utf-8") as lines:
        prompt = json.loads(next(lines))["text"]
    return model, {"input_ids": AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt").input_ids}
