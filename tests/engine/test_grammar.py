"""Answers that keep to a grammar, beside others that do not; needs llguidance."""

import json
import re

import pytest
import torch
from tests.engine.letters import END, letters
from tests.models import zoo

from tilewright import Engine
from tilewright.engine import Grammar, SamplingParams
from tilewright.engine.grammar import apply
from tilewright.errors import InputError, TilewrightError

SIZES = {"max_batch": 4, "step_tokens": 16, "page_size": 4, "max_context": 96}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 8}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module")
def engine():
    pytest.importorskip("llguidance")
    model = zoo.build("llama")
    model.generation_config.eos_token_id = END
    with Engine(model, letters(), **SIZES) as engine:
        yield engine


def asked(grammar, seed, **options):
    return SamplingParams(max_tokens=60, temperature=1.5, seed=seed, grammar=grammar, **options)


def test_answers_keep_to_a_schema_and_others_are_as_alone(engine):
    free = SamplingParams(max_tokens=25, temperature=1.0, seed=3, ignore_eos=True)
    alone = engine.generate("free", free)[0].tokens
    schema = Grammar("json_schema", json.dumps(SCHEMA))
    outputs = engine.generate(["an animal: "] * 6 + ["free"], [asked(schema, seed) for seed in range(6)] + [free])
    for output in outputs[:6]:
        answer = json.loads(output.text)
        assert output.reason == "stop" and set(answer) == {"kind", "legs"}
        assert answer["kind"] in ("cat", "dog") and 0 <= answer["legs"] <= 8
    assert len({output.text for output in outputs[:6]}) > 1, "drawn, not forced"
    assert outputs[6].tokens == alone
    assert engine.statistics["pages_held"] == 0


@pytest.mark.parametrize(("kind", "text"), [("regex", "[a-c]{3,5}(x|yz)"), ("lark", "start: /[a-c]{3,5}(x|yz)/")])
def test_expressions_and_grammars(engine, kind, text):
    for output in engine.generate(["a", "b", "c"], [asked(Grammar(kind, text), seed) for seed in range(3)]):
        assert re.fullmatch("[a-c]{3,5}(x|yz)", output.text)


def test_where_pages_are_short():
    pytest.importorskip("llguidance")
    expression = Grammar("regex", "[ab]{30}")
    prompts, params = ["one", "another", "third"], [asked(expression, seed) for seed in range(3)]
    model = zoo.build("llama")
    model.generation_config.eos_token_id = END
    with Engine(model, letters(), cache_tokens=68, **SIZES) as engine:
        outputs = engine.generate(prompts, params)
        assert engine.statistics["preemptions"] > 0
    assert all(re.fullmatch("[ab]{30}", output.text) for output in outputs)


def test_a_length_ends_an_answer_before_its_grammar(engine):
    params = SamplingParams(max_tokens=4, grammar=Grammar("regex", "[ab]{30}"), prompt_logprobs=True)
    output = engine.generate("x", params)[0]
    assert output.reason == "length" and re.fullmatch("[ab]{4}", output.text)


@pytest.mark.parametrize(
    ("grammar", "match"),
    [
        (Grammar("regex", "[a"), "the grammar is refused"),
        (Grammar("json_schema", '{"type": "nothing"}'), "the grammar is refused"),
        (Grammar("json_schema", "{"), "is no JSON: "),
        (Grammar("json_schema", "[]"), "is no JSON object"),
        (Grammar("lark", "no rule"), "the grammar is refused"),
        (Grammar("other", ""), "'other' is none"),
    ],
)
def test_wrong_grammars_are_refused(engine, grammar, match):
    with pytest.raises(InputError, match=match):
        engine.submit("x", asked(grammar, 0))


def test_a_grammar_needs_a_fast_tokenizer():
    pytest.importorskip("llguidance")
    with Engine(zoo.build("llama"), **SIZES) as engine, pytest.raises(InputError, match="this tokenizer"):
        engine.submit([3, 4], asked(Grammar("regex", "a"), 0))


def test_log_probabilities_know_no_grammar():
    with pytest.raises(InputError, match="exclude each other"):
        asked(Grammar("regex", "a"), 0, logprobs=True)


def test_masks_of_rows():
    logits = torch.arange(3 * 70.0).view(3, 70)
    words = torch.tensor([0b101, -(2**31), 1 << 5], dtype=torch.int32)
    masked = apply(logits, {2: words})
    assert torch.equal(masked[:2], logits[:2])
    assert masked[2].isfinite().nonzero().flatten().tolist() == [0, 2, 63, 69]
    assert apply(logits, {}) is logits


class Broken:
    """A matcher of llguidance that fails."""

    def __init__(self, matcher):
        self.matcher = matcher

    def __getattr__(self, name):
        return getattr(self.matcher, name)

    def compute_bitmask(self):
        raise RuntimeError("broken matcher")


def test_a_grammar_that_crashes_ends_its_own_request_alone(engine, monkeypatch):
    make, free = engine._matcher, SamplingParams(max_tokens=8, ignore_eos=True)
    alone = engine.generate("free", free)[0].tokens

    def broken(params):
        if (matcher := make(params)) is not None:
            matcher._matcher = Broken(matcher._matcher)
        return matcher

    monkeypatch.setattr(engine, "_matcher", broken)
    bad, good = engine.submit("x", asked(Grammar("regex", "[ab]{9}"), 0)), engine.submit("free", free)
    with pytest.raises(TilewrightError, match="or a grammar does"):
        bad.result(timeout=60)
    assert good.result(timeout=60).tokens == alone
