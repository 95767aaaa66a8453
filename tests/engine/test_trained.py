"""The model that lies in `examples/`: greedy tokens of held-out prompts are those of `model.generate` in float32."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from tilewright import Engine
from tilewright.engine import SamplingParams

EXAMPLE = Path(__file__).parents[2] / "examples" / "stdlib_lm"


def held_out():
    with (EXAMPLE / "model" / "prompts.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


@pytest.mark.parametrize(("prompts", "count"), [(3, 24), pytest.param(50, 500, marks=pytest.mark.exhaustive, id="all")])
def test_greedy_tokens_of_held_out_prompts(prompts, count):
    from transformers import AutoTokenizer

    model, _ = runpy.run_path(str(EXAMPLE / "factory.py"))["factory"]()
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "model")
    room = min(model.config.max_position_embeddings, 2 * count + 64)
    each = [tokenizer(text)["input_ids"][: room - count] for text in held_out()[:prompts]]
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    with Engine(model, max_batch=16, max_context=room, cache_tokens=8 * room) as engine:
        outputs = engine.generate(each, params)
    model.generation_config.eos_token_id = None
    assert len(each) == prompts
    for tokens, output in zip(each, outputs, strict=True):
        wanted = model.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False)[0, len(tokens) :]
        assert output.tokens == wanted.tolist()
