"""Speculation and float8 caches: tokens are those without drafts, greedy and drawn; and everything at once."""

import random
from collections import Counter

import pytest
import torch
from tests.engine.eager_graphs import EagerGraphs
from tests.engine.test_engine import SIZES, Letters, prompt, silent
from tests.models import zoo

from tilewright import Engine
from tilewright.engine import SamplingParams
from tilewright.engine.drafter import PromptLookup
from tilewright.engine.runner import Runner
from tilewright.errors import InputError

MANY = {"max_batch": 8, "step_tokens": 48, "page_size": 4, "max_context": 64}
REPEATED = [5, 9, 2, 7, 5, 9, 2, 7, 5, 9]


@pytest.fixture(scope="module")
def model():
    return silent(zoo.build("llama"))


@pytest.fixture
def accepted(monkeypatch):
    """How many tokens steps with drafts gave, by number of drafts."""
    from tilewright.engine.scheduler import Scheduler

    counts, accept = Counter(), Scheduler.accept

    def counted(self, chunk, drawn):
        count = accept(self, chunk, drawn)
        counts[len(chunk.drafts), count] += 1
        return count

    monkeypatch.setattr(Scheduler, "accept", counted)
    return counts


def test_tokens_are_those_without_speculation(model, accepted):
    each = [
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=30, temperature=0.3, seed=1),
        SamplingParams(max_tokens=30, temperature=1.5, top_k=4, top_p=0.9, min_p=0.02, seed=2, logprobs=True),
        SamplingParams(max_tokens=30, frequency_penalty=0.5),
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=2),
    ]
    prompts = [REPEATED, prompt(9), REPEATED, prompt(30, 1), REPEATED, REPEATED]
    with Engine(model, **SIZES) as engine:
        plain = engine.generate(prompts, each)
    for sizes in ({"num_draft_tokens": 1}, {"num_draft_tokens": 5, "cache_tokens": 96}):
        with Engine(model, speculation="prompt_lookup", **SIZES, **sizes) as engine:
            outputs = engine.generate(prompts, each)
            assert engine.statistics["pages_held"] == 0
        assert [output.tokens for output in outputs] == [output.tokens for output in plain]
        assert outputs[2].logprobs == pytest.approx(plain[2].logprobs, abs=1e-4)
    assert sum(n for (drafts, count), n in accepted.items() if count > 1) > 5, "some drafts are right"
    assert sum(n for (drafts, count), n in accepted.items() if count <= drafts) > 5, "and some are wrong"


def test_a_stop_token_among_accepted_drafts_ends_the_request(model, accepted, monkeypatch):
    tokens = []
    with Engine(model, **SIZES) as engine:
        tokens = engine.generate(prompt(9), SamplingParams(max_tokens=30))[0].tokens

    def right(self, known, count):  # drafts that are always accepted
        return tuple(tokens[len(known) - 9 :][:count])

    monkeypatch.setattr(PromptLookup, "drafts", right)
    stop = next(token for token in tokens[6:] if tokens.index(token) == tokens.index(token, 6))
    with Engine(model, speculation="prompt_lookup", **SIZES) as engine:
        output = engine.generate(prompt(9), SamplingParams(max_tokens=30, stop_tokens=(stop,)))[0]
        whole = engine.generate(prompt(9), SamplingParams(max_tokens=30))[0]
    assert output.tokens == tokens[: tokens.index(stop) + 1]
    assert (whole.tokens, whole.reused) == (tokens, 8)
    assert accepted[4, 5] > 3


@pytest.mark.parametrize("speculation", [None, "prompt_lookup"])
def test_padded_steps_change_nothing(model, monkeypatch, speculation):
    monkeypatch.setattr(Runner, "_wait", lambda runner: None)
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {5: 1.0}, "min_tokens": 3}
    each = [SamplingParams(max_tokens=12 + 3 * n, seed=n, **penalties if n % 3 == 1 else {}) for n in range(7)]
    prompts = [REPEATED[: 4 + n] for n in range(7)]
    sizes = SIZES | {"max_batch": 7, "step_tokens": 32}
    with Engine(model, **sizes) as engine:
        plain = engine.generate(prompts, each)
    with Engine(model, speculation=speculation, cache_tokens=96, **sizes) as engine:
        graphs = engine._runner._graphs = EagerGraphs()
        engine.warmup()
        assert sum(step.tokens == step.rows for step in graphs) == 6 * (1 if speculation is None else 2)
        assert not any(step.has_penalties for step in graphs), "they are captured when met"
        outputs = engine.generate(prompts, each)
        assert any(step.has_penalties for step in graphs)
        assert engine.statistics["preemptions"] > 0
    assert [output.tokens for output in outputs] == [output.tokens for output in plain]


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_float8_cache_is_near_and_a_known_prefix_changes_nothing(name):
    model = silent(zoo.build(name))
    with Engine(model, kv_dtype=torch.float8_e4m3fn, **SIZES) as engine:
        params = SamplingParams(max_tokens=8, logprobs=True)
        first, second = (engine.generate(prompt(40), params)[0] for _ in range(2))
    assert second.reused == 36
    assert (second.tokens, second.logprobs) == (first.tokens, pytest.approx(first.logprobs, abs=1e-4))
    with torch.no_grad():
        logits = model(torch.tensor([prompt(40) + first.tokens])).logits[0].log_softmax(-1)
    wanted = [logits[39 + i, token].item() for i, token in enumerate(first.tokens)]
    assert first.logprobs == pytest.approx(wanted, abs=0.1)
    assert first.logprobs != pytest.approx(wanted, abs=1e-5), "keys are in float8"


def test_a_float8_cache_holds_more_tokens(model):
    with Engine(model, **SIZES) as engine:
        plain = engine._model.bytes_per_token()
        small = engine._model.bytes_per_token(torch.float8_e4m3fn)
    heads, depth, layers = 2, plain // (2 * 2 * 4 * 2), 2
    assert small == layers * 2 * heads * (depth + 4) < plain


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kv_dtype": torch.float16}, "kv_dtype is torch.float16"),
        ({"speculation": "medusa"}, "speculation is 'medusa'"),
        ({"speculation": "prompt_lookup", "num_draft_tokens": 0}, "num_draft_tokens is 0"),
    ],
)
def test_options_are_checked(model, change, match):
    with pytest.raises(InputError, match=match):
        Engine(model, **SIZES | change)


@pytest.fixture(scope="module")
def many(model):
    """Prompts, parameters, and the outputs of an engine with room for all."""
    draw, every = random.Random(3), []
    for n in range(64):
        tokens = (prompt(8, n % 5) * 3)[: draw.randint(1, 24)]
        params = SamplingParams(
            max_tokens=draw.randint(1, 16),
            temperature=draw.choice((0.0, 0.7)),
            seed=n % 7,
            presence_penalty=draw.choice((0.0, 0.0, 0.5)),
            min_tokens=draw.choice((0, 0, 1)),
            stop=draw.choice(((), (), ("a",), ("ab", "c"))),
            stop_tokens=draw.choice(((), (3, 40))),
        )
        every.append((tokens, params))
    with Engine(model, Letters(), **MANY) as engine:
        return every, engine.generate(*zip(*every, strict=True))


@pytest.mark.parametrize("speculation", [None, "prompt_lookup"])
def test_nothing_is_lost_or_mixed_among_many(model, many, speculation):
    every, plain = many
    with Engine(model, Letters(), cache_tokens=64, speculation=speculation, **MANY) as engine:
        generations = [engine.submit(*each) for each in every]
        for generation in generations[::5]:
            generation.cancel()
        outputs = [generation.result(timeout=60) for generation in generations]
        assert engine.statistics["pages_held"] == engine.statistics["running"] == engine.statistics["waiting"] == 0
        assert engine.statistics["preemptions"] > 0
    for n, (output, wanted) in enumerate(zip(outputs, plain, strict=True)):
        assert output.prompt == wanted.prompt
        if n % 5:
            assert (output.tokens, output.text, output.reason) == (wanted.tokens, wanted.text, wanted.reason)
        else:
            assert output.tokens == wanted.tokens[: len(output.tokens)]
