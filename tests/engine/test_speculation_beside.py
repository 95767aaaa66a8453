"""Drafts beside penalties, biases, least lengths and grammars: tokens are those without drafts."""

import pytest
import torch
from tests.engine.eager_graphs import EagerGraphs
from tests.engine.letters import END, letters
from tests.engine.test_draft import near, same
from tests.engine.test_engine import SIZES, prompt, silent
from tests.engine.test_grammar import SIZES as GRAMMAR_SIZES
from tests.engine.test_grammar import asked
from tests.engine.test_penalties import greedy
from tests.engine.test_speculation import REPEATED
from tests.models import zoo

from tilewright import Engine
from tilewright.engine import Grammar, SamplingParams
from tilewright.engine.penalties import Drafts
from tilewright.engine.runner import Runner

REPEATS = {"frequency_penalty": -0.5}
COUNTED = {"frequency_penalty": 0.1, "logit_bias": {5: 2.0, 9: 2.0, 2: 2.0}}  # three tokens in turn, as counts decide
EACH = [
    SamplingParams(max_tokens=24, **REPEATS),
    SamplingParams(max_tokens=20, temperature=0.7, seed=3, repetition_penalty=1.3, logit_bias={5: 1.0}, logprobs=True),
    SamplingParams(max_tokens=20, presence_penalty=-0.4, min_tokens=9, stop_tokens=tuple(range(0, 128, 3))),
    SamplingParams(max_tokens=24, **COUNTED),
    SamplingParams(max_tokens=20, temperature=0.5, seed=4, min_tokens=20, stop_tokens=(7, 9), **REPEATS),
]
PROMPTS = [REPEATED, prompt(9), REPEATED, REPEATED, prompt(21, 1)]


@pytest.fixture(scope="module")
def model():
    return silent(zoo.build("llama"))


@pytest.fixture(scope="module")
def plain(model):
    with Engine(model, **SIZES) as engine:
        return engine.generate(PROMPTS, EACH)


@pytest.mark.parametrize("kind", ["prompt_lookup", "draft"])
@pytest.mark.parametrize("sizes", [{"num_draft_tokens": 1}, {"num_draft_tokens": 5, "cache_tokens": 64}])
def test_tokens_are_those_without_drafts(model, plain, kind, sizes):
    options = {"speculation": kind} if kind == "prompt_lookup" else {"draft_model": near(model, 0.3)}
    with Engine(model, **options, **SIZES, **sizes) as engine:
        same(engine.generate(PROMPTS, EACH), plain)
        statistics = engine.statistics
    assert (statistics["preemptions"] > 0) == ("cache_tokens" in sizes)
    assert 5 < statistics["accepted_tokens"] < statistics["draft_tokens"], "some drafts are right, and some wrong"


@pytest.mark.parametrize("change", [REPEATS, COUNTED])
def test_accepted_tokens_are_those_of_the_definitions(model, change):
    params = SamplingParams(max_tokens=24, **change)
    with Engine(model, speculation="prompt_lookup", **SIZES) as engine:
        (output,) = engine.generate([REPEATED], params)
        assert engine.statistics["accepted_tokens"] > 8
    assert output.tokens == greedy(model, REPEATED, params)[0]


def test_the_model_itself_is_always_right_under_penalties(model, plain):
    with Engine(model, draft_model=model, **SIZES) as engine:
        same(engine.generate(PROMPTS, EACH), plain)
        assert engine.statistics["accepted_tokens"] == engine.statistics["draft_tokens"] > 40


@pytest.mark.parametrize("kind", ["prompt_lookup", "draft"])
def test_padded_steps_change_nothing(model, plain, monkeypatch, kind):
    monkeypatch.setattr(Runner, "_wait", lambda runner: None)
    options = {"speculation": kind} if kind == "prompt_lookup" else {"draft_model": near(model, 0.3)}
    with Engine(model, **options, **SIZES) as engine:
        graphs = engine._runner._graphs = EagerGraphs()
        same(engine.generate(PROMPTS, EACH), plain)
    assert any(step.has_penalties and step.drafts for step in graphs)


def test_rows_of_drafts():
    tokens, numbers = torch.tensor([9, 3, 4, 8, 5, 6]), torch.tensor([0, 1, 2, 0, 0, 1])
    drafts = Drafts(tokens, numbers, 2)
    behind = [[int(t) for t, has in zip(*each, strict=True) if has] for each in drafts.before()]
    assert behind == [[3, 4, 6], [3]]
    assert drafts.accepted(torch.tensor([3, 4, 0, 8, 6, 0])).all()
    assert drafts.accepted(torch.tensor([3, 0, 4, 8, 5, 0])).tolist() == [True, True, False, True, True, False]
    assert drafts.accepted(torch.tensor([0, 4, 0, 8, -1, 0])).tolist() == [True, False, False, True, True, False]


@pytest.fixture(scope="module")
def writer():
    pytest.importorskip("llguidance")
    model = zoo.build("llama")
    model.generation_config.eos_token_id = END
    return model


def test_answers_of_a_grammar_are_those_without_drafts(writer):
    each = [
        asked(Grammar("regex", "(abc){4,9}d{0,30}"), 1),
        asked(Grammar("regex", "([ab]c){20}"), 2, frequency_penalty=-0.5),
        asked(Grammar("json_schema", '{"type": "array", "items": {"enum": ["cat", "dog"]}, "minItems": 4}'), 3),
        SamplingParams(max_tokens=20, **REPEATS),
    ]
    prompts = ["abcabc", "acbcac", '["cat", "dog", "cat", "dog"', "free free free"]
    with Engine(writer, letters(), **GRAMMAR_SIZES) as engine:
        plain = engine.generate(prompts, each)
    for options in ({"speculation": "prompt_lookup", "cache_tokens": 112}, {"draft_model": writer}):
        with Engine(writer, letters(), **options, **GRAMMAR_SIZES) as engine:
            same(engine.generate(prompts, each), plain)
            assert engine.statistics["accepted_tokens"] > (20 if "speculation" in options else 5)
            assert engine.statistics["pages_held"] == 0


def test_drafts_end_where_a_grammar_does(writer):
    with Engine(writer, letters(), **GRAMMAR_SIZES) as engine:
        matcher = engine._matcher(SamplingParams(grammar=Grammar("regex", "[ab]{2}c?")))
    a, b, c, d = letters()("abcd")["input_ids"]
    assert matcher.allowed([a, b, d]) == (a, b)
    assert matcher.allowed([a, b, c, a]) == (a, b), "behind c nothing follows"
    assert matcher.allowed([d, a]) == matcher.allowed([]) == ()
    allowed = [{t for t in (a, b, c, d, END) if mask[t // 32] >> (t % 32) & 1} for mask in matcher.masks([a, b])]
    assert allowed == [{a, b}, {a, b}, {c, END}]
    for token in (a, b, c):
        assert not matcher.is_over
        matcher.accept(token)
    assert matcher.is_over and not matcher.error
