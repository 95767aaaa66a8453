"""Log-probabilities of prompts and of alternatives: those of the model itself, however a prompt is computed."""

import pytest
import torch
from tests.models import zoo

from tilewright import Engine
from tilewright.engine import SamplingParams
from tilewright.errors import InputError, TilewrightError

SIZES = {"max_batch": 3, "step_tokens": 16, "page_size": 4, "max_context": 96}
WHOLE = SamplingParams(max_tokens=0, prompt_logprobs=True, top_logprobs=3)


@pytest.fixture(scope="module")
def model():
    model = zoo.build("llama")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompt(length, seed=0):
    return zoo.tokens(1, length, seed)[0].tolist()


@torch.no_grad()
def expected(model, tokens):
    """(T, V) log_softmax in float32; row p is behind token p."""
    return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def check(output, model, top=3):
    """Both lists of the prompt are those of the model."""
    rows = expected(model, output.prompt)
    assert output.prompt_logprobs[0] is output.prompt_top_logprobs[0] is None
    for place in range(1, len(output.prompt)):
        row = rows[place - 1]
        assert output.prompt_logprobs[place] == pytest.approx(row[output.prompt[place]].item(), abs=2e-5)
        values, likeliest = row.topk(top)
        its = output.prompt_top_logprobs[place]
        assert list(its) == likeliest.tolist()
        assert list(its.values()) == pytest.approx(values.tolist(), abs=2e-5)


def test_prompts_in_chunks_beside_others(model):
    prompts = [prompt(length, length) for length in (1, 2, 16, 37, 60)]
    each = [WHOLE] * 5 + [SamplingParams(max_tokens=20)] * 2
    with Engine(model, **SIZES) as engine:
        outputs = engine.generate([*prompts, prompt(9), prompt(30, 3)], each)
        alone = engine.generate([prompt(9), prompt(30, 3)], SamplingParams(max_tokens=20))
    for output in outputs[:5]:
        assert (output.tokens, output.reason) == ([], "length")
        check(output, model)
    assert [output.tokens for output in outputs[5:]] == [output.tokens for output in alone]
    assert outputs[5].prompt_logprobs is outputs[5].prompt_top_logprobs is outputs[5].top_logprobs is None


def test_a_known_prefix_is_computed_again_and_known_to_others(model):
    with Engine(model, **SIZES) as engine:
        engine.generate(prompt(30), SamplingParams(max_tokens=1))
        output = engine.generate(prompt(30), WHOLE)[0]
        assert output.reused == 0
        check(output, model)
        assert engine.generate(prompt(30), SamplingParams(max_tokens=1))[0].reused == 28
        assert engine.statistics["pages_held"] == 0


def test_where_pages_are_short(model):
    params = SamplingParams(max_tokens=12, prompt_logprobs=True, top_logprobs=2, logprobs=True)
    with Engine(model, cache_tokens=64, **SIZES) as engine:
        outputs = engine.generate([prompt(length, length) for length in (30, 33, 40)], params)
        assert engine.statistics["preemptions"] > 0
    for output in outputs:
        check(output, model, top=2)
        assert len(output.tokens) == len(output.top_logprobs) == len(output.logprobs) == 12


def test_alternatives_of_drawn_tokens(model):
    several = [SamplingParams(max_tokens=10, temperature=1.0, seed=5, logprobs=True, top_logprobs=k) for k in (0, 2, 5)]
    with Engine(model, **SIZES) as engine:
        plain, two, five = engine.generate([prompt(7)] * 3, several)
    assert plain.tokens == two.tokens == five.tokens, "alternatives change no draw"
    assert plain.top_logprobs is None
    rows = expected(model, five.prompt + five.tokens)[len(five.prompt) - 1 : -1]
    assert five.logprobs == pytest.approx([row[token].item() for row, token in zip(rows, five.tokens, strict=True)])
    for row, wide, narrow in zip(rows, five.top_logprobs, two.top_logprobs, strict=True):
        assert wide == pytest.approx(dict(zip(row.topk(5).indices.tolist(), row.topk(5).values.tolist(), strict=True)))
        assert list(narrow) == list(wide)[:2]


def test_nothing_new_needs_no_room(model):
    with Engine(model, cache_tokens=32, **SIZES) as engine:
        check(engine.generate(prompt(32), WHOLE)[0], model)
        with pytest.raises(InputError, match="exceed the 32"):
            engine.submit(prompt(33), WHOLE)


def test_nan_behind_a_token_of_the_prompt_fails_its_request(model):
    bad = zoo.build("llama")
    with torch.no_grad():
        bad.model.embed_tokens.weight[5] = float("nan")
    with Engine(bad, **SIZES) as engine:
        with pytest.raises(TilewrightError, match="NaN"):
            engine.generate([3, 5, 7, 9], WHOLE)
        check(engine.generate([3, 4, 7, 9], WHOLE)[0], bad)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 2}, "needs logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs is 21"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs is -1"),
    ],
)
def test_what_is_refused(options, match):
    with pytest.raises(InputError, match=match):
        SamplingParams(**options)
