"""Penalties, biases and lengths that a request must have: those of plain formulas, in any company, one step ahead."""

import pytest
import torch
from tests.models import zoo

from tilewright import Engine
from tilewright.engine import SamplingParams
from tilewright.errors import InputError, TilewrightError

SIZES = {"max_batch": 3, "step_tokens": 16, "page_size": 4, "max_context": 96}
PROMPT = zoo.tokens(1, 11, 3)[0].tolist()
ALL = {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {5: 0.5, 9: -1.0}}


@pytest.fixture(scope="module")
def model():
    model = zoo.build("llama")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, cache_tokens=96, **SIZES) as engine:
        yield engine


def greedy(model, prompt, params):
    """Tokens by the definitions, one forward pass of all tokens each; and log-probabilities of the model's."""
    tokens, logprobs = list(prompt), []
    for _ in range(params.max_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        new = torch.bincount(torch.tensor(tokens[len(prompt) :], dtype=torch.int64), minlength=logits.shape[0])
        y = logits.clone()
        for token in set(tokens):
            y[token] = y[token] / params.repetition_penalty if y[token] > 0 else y[token] * params.repetition_penalty
        y = y - params.presence_penalty * (new > 0) - params.frequency_penalty * new
        for token, bias in params.logit_bias.items():
            y[token] += bias
        tokens.append(int(y.argmax()))
        logprobs.append(logits.log_softmax(0)[tokens[-1]].item())
    return tokens[len(prompt) :], logprobs


@pytest.mark.parametrize("change", [*({name: value} for name, value in ALL.items()), ALL], ids=[*ALL, "all"])
def test_tokens_are_those_of_the_definitions(engine, model, change):
    params = SamplingParams(max_tokens=24, logprobs=True, **change)
    tokens, logprobs = greedy(model, PROMPT, params)
    plain, output = engine.generate([PROMPT, PROMPT], [SamplingParams(max_tokens=24), params])
    assert output.tokens == tokens != plain.tokens
    assert output.logprobs == pytest.approx(logprobs, abs=1e-4), "of the model, before penalties"


def test_repetition_is_transformers(engine, model):
    wanted = model.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, repetition_penalty=1.5)
    (output,) = engine.generate([PROMPT], SamplingParams(max_tokens=24, repetition_penalty=1.5))
    assert output.tokens == wanted[0, len(PROMPT) :].tolist()


def test_company_preemption_and_slots_of_others_change_nothing(model):
    each = [
        SamplingParams(max_tokens=25, **ALL),
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=25, temperature=0.9, top_k=20, seed=4, frequency_penalty=0.7),
        SamplingParams(max_tokens=12, logit_bias={7: 100.0}),
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=20, presence_penalty=1.0, min_tokens=5, stop_tokens=(3, 5)),
    ]
    prompts = [zoo.tokens(1, 3 + 5 * n, n)[0].tolist() for n in range(len(each))]
    with Engine(model, **SIZES) as engine:
        alone = [engine.generate(prompt, params)[0].tokens for prompt, params in zip(prompts, each, strict=True)]
    with Engine(model, cache_tokens=80, **SIZES) as engine:
        assert [output.tokens for output in engine.generate(prompts, each)] == alone
        assert engine.statistics["preemptions"] > 0
        assert engine.statistics["pages_held"] == 0
    assert alone[3] == [7] * 12


def test_a_request_has_its_least_tokens(engine):
    tokens = engine.generate(PROMPT, SamplingParams(max_tokens=20))[0].tokens
    stops = (tokens[2], tokens[6])
    params = SamplingParams(max_tokens=20, min_tokens=6, stop_tokens=stops)
    (output,) = engine.generate([PROMPT], params)
    assert not set(stops) & set(output.tokens[:6])
    exact = SamplingParams(max_tokens=20, min_tokens=6, stop_tokens=stops, logit_bias={stops[0]: 100.0})
    (output,) = engine.generate([PROMPT], exact)
    assert (len(output.tokens), output.tokens[-1], output.reason) == (7, stops[0], "stop")


def test_all_tokens_forbidden_fails_that_request_alone(engine):
    never = SamplingParams(max_tokens=3, logit_bias=dict.fromkeys(range(zoo.VOCABULARY), float("-inf")))
    bad, good = engine.submit(PROMPT, never), engine.submit(PROMPT, SamplingParams(max_tokens=3))
    with pytest.raises(TilewrightError, match="logit_bias forbids every token"):
        bad.result(timeout=60)
    assert len(good.result(timeout=60).tokens) == 3


def test_a_bias_of_no_token_is_refused(engine):
    with pytest.raises(InputError, match=r"logit_bias has tokens \[128\]"):
        engine.submit(PROMPT, SamplingParams(logit_bias={128: 1.0}))
