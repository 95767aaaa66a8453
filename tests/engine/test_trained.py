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


ALL = [pytest.param(range(n, n + 4), 500, marks=pytest.mark.exhaustive) for n in range(0, 48, 4)]


@pytest.mark.parametrize(("prompts", "count"), [(range(2), 16), *ALL])
def test_greedy_tokens_of_held_out_prompts(prompts, count):
    from transformers import AutoTokenizer

    model, _ = runpy.run_path(str(EXAMPLE / "factory.py"))["factory"]()
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "model")
    room, texts = count + 64, held_out()
    each = [tokenizer(texts[n])["input_ids"][:64] for n in prompts]
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    with Engine(model, max_batch=4, max_context=room, cache_tokens=3 * room) as engine:
        outputs = engine.generate(each, params)
    model.generation_config.eos_token_id = None
    for tokens, output in zip(each, outputs, strict=True):
        wanted = model.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False)[0, len(tokens) :]
        assert output.tokens == wanted.tolist()
