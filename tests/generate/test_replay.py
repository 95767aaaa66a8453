"""The host's side of captured decoding, without a GPU: buckets, warm-up before a call, reports that arrive one late.

A stand-in runs the step where a graph would replay it, with what was fixed at capture time.
"""

import pytest
import torch
from tests.generate.tiny import build, prompts

from tilewright.generate import StaticDecoder, static
from tilewright.generate.readback import Readback

BUCKET = 16


class Steps:
    """Stands for StepGraphs."""

    def __init__(self, decoder: StaticDecoder) -> None:
        self.decoder, self.captured, self.replayed = decoder, {}, 0

    def __contains__(self, key):
        return key in self.captured

    def __len__(self):
        return len(self.captured)

    def clear(self):
        self.captured.clear()

    def capture(self, key, step, rewind):
        visible = self.decoder._cache.cursor.visible
        for _ in range(3):  # two warm-ups; a real capture would not execute the third
            rewind()
            step()
        self.captured[key] = visible

    def replay(self, key):
        self.decoder._cache.cursor.visible = self.captured[key]
        self.decoder._step()
        self.replayed += 1


@pytest.fixture
def captured(monkeypatch):
    """`captured(model, ...)`: a decoder that believes it replays graphs, and hears of results late."""
    monkeypatch.setattr(static, "_BUCKET", BUCKET)
    monkeypatch.setattr(Readback, "lag", 1)

    def make(model, **options):
        decoder = StaticDecoder(model, **options)
        decoder._graphs = Steps(decoder)
        return decoder

    return make


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral"])
def test_equals_transformers_across_buckets(models, captured, family):
    """Warming up writes into the cache, so it must come before the prompt is read; buckets cover every position."""
    model = models(family)
    decoder = captured(model, max_length=150, batch_size=2)
    for length in (19, 47, 3):
        ids, mask = prompts(2, length, pads=2)
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=100, do_sample=False)
        assert torch.equal(decoder.generate(ids, mask, max_new_tokens=100), expected)
    assert sorted(decoder._graphs.captured.values()) == [*range(BUCKET, 145, BUCKET), 150]


def test_only_the_needed_buckets_are_captured(models, captured):
    decoder = captured(models("llama"), max_length=150)
    decoder.prepare(30, 5)
    assert sorted(decoder._graphs.captured.values()) == [32, 48]
    assert decoder.prepare(30, 5) >= 0
    assert len(decoder._graphs) == 2


@pytest.mark.parametrize("stop", range(1, 14))
def test_end_of_text_is_exact_and_noticed_soon(captured, stop):
    """Reports come every four steps and one late: at most seven steps are spare."""
    model = build("llama")
    ids, mask = prompts(1, 8)
    free = model.generate(ids, attention_mask=mask, max_new_tokens=100, do_sample=False)
    eos = int(free[0, 7 + stop])
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=100, do_sample=False, eos_token_id=eos)
    decoder = captured(model, max_length=128)
    assert torch.equal(decoder.generate(ids, max_new_tokens=100, eos_token_id=eos), expected)
    needed = expected.shape[1] - 9  # the first token comes from the prompt
    assert needed <= decoder._graphs.replayed <= needed + 7


def test_sampling_settings_and_graphs(models, captured):
    """Temperature and top-p live in buffers; top-k and whether top-p acts are part of the graph."""
    decoder = captured(models("llama"), max_length=32)
    ids, _ = prompts(1, 8)
    count = []
    for setting in (
        {},
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.5},
        {"do_sample": True, "top_p": 0.9},
        {"do_sample": True, "top_p": 0.5},
        {"do_sample": True, "top_k": 7},
    ):
        decoder.generate(ids, max_new_tokens=4, **setting)
        count.append(len(decoder._graphs))
    assert count == [1, 2, 2, 3, 3, 4]


def test_a_changed_model_drops_its_graphs(captured):
    model = build("llama")
    decoder = captured(model, max_length=32)
    ids, mask = prompts(1, 8)
    decoder.generate(ids, max_new_tokens=4)
    first = decoder._graphs.captured.copy()
    decoder.generate(ids, max_new_tokens=4)
    assert decoder._graphs.captured == first
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() * 1.1
    decoder._graphs.captured[(None, "stale")] = 0
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert torch.equal(decoder.generate(ids, max_new_tokens=4), expected)
    assert (None, "stale") not in decoder._graphs
    decoder.reset()
    assert len(decoder._graphs) == 0
