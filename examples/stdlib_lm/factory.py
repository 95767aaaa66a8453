"""The committed model as `tilewright optimize examples/stdlib_lm/factory.py:factory` takes it."""

import json
from pathlib import Path

import torch
from torch import nn

MODEL = Path(__file__).parent / "model"


def factory() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The trained model and one held-out prompt as its input, `input_ids` (1, tokens) int64, both on the CPU.

    The weights are widened to float32, so that going to a smaller type is a change to be measured like any other.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not MODEL.is_dir():
        raise FileNotFoundError(
            f"no trained model at {MODEL}. Train it: python {MODEL.parent / 'train.py'} --out {MODEL}"
        )
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    with (MODEL / "prompts.jsonl").open(encoding="utf-8") as lines:
        prompt = json.loads(next(lines))["text"]
    return model, {"input_ids": AutoTokenizer.from_pretrained(MODEL)(prompt, return_tensors="pt").input_ids}
