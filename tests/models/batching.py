"""Continuous batching of tiny models: how tests run it and what they watch."""

from typing import Any

import pytest
import torch
from tests.models.zoo import tokens
from transformers import ContinuousBatchingConfig, GenerationConfig

from tilewright.models import register_attention, transformers_names
from tilewright.models.attention import paged

NAME = f"paged|{register_attention()}"
NEW_TOKENS = 12
LENGTHS = (5, 17, 30, 9, 2)
supported = pytest.mark.skipif(
    not transformers_names.takes_paged_names(), reason="from 5.19 on continuous batching refuses foreign names"
)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [tokens(1, length, seed=length)[0].tolist() for length in lengths]


def greedy() -> GenerationConfig:
    return GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)


def batching(**options: Any) -> ContinuousBatchingConfig:
    """Pages of 4 tokens, and batches so small that the longer prompts are cut into chunks."""
    size = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
    return ContinuousBatchingConfig(**{size: 4, "num_blocks": 60, "max_batch_tokens": 24, **options})


def batched(model: Any, name: str, texts: list[list[int]], tables: int = 0, **options: Any) -> list[list[int]]:
    """The tokens of each request.  tables: pages of a request in the block tables of decode steps; 0: no tables."""
    model.set_attn_implementation(name)
    manager = model.init_continuous_batching(generation_config=greedy(), continuous_batching_config=batching(**options))
    if tables:
        manager.continuous_batching_config.max_blocks_per_request = tables
    results: dict[str, Any] = {}
    try:
        manager.warmup()
        manager.start()
        names = manager.add_requests(texts, max_new_tokens=NEW_TOKENS)
        while len(results) < len(texts):
            result = manager.get_result(timeout=60)
            assert result is not None, "continuous batching stopped"
            assert result.error is None, result.error
            if result.is_finished():
                results[result.request_id] = result.generated_tokens
    finally:
        manager.stop(hard_stop=len(results) < len(texts))
        manager.destroy()
    return [results[name] for name in names]


def alone(model: Any, name: str, texts: list[list[int]]) -> list[list[int]]:
    """The same of `generate`, one request after another."""
    model.set_attn_implementation(name)
    device = next(model.parameters()).device
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    rows = [model.generate(torch.tensor([text], device=device), **options) for text in texts]
    return [row[0, len(text) :].tolist() for row, text in zip(rows, texts, strict=True)]


class Watch:
    """What `attend_paged` does while a test runs: the layers' calls, and the steps that were computed for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[int] = []  # tokens
        self.steps: list[tuple[paged.Step, bool]] = []  # and whether block tables came with them
        find, make = paged._step, paged._new_step

        def step(*args: Any) -> paged.Step:
            self.calls.append(args[2])
            return find(*args)

        def new_step(*args: Any) -> paged.Step:
            new = make(*args)
            self.steps.append((new, args[2]["block_table"] is not None))
            return new

        monkeypatch.setattr(paged, "_step", step)
        monkeypatch.setattr(paged, "_new_step", new_step)
