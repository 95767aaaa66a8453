"""The engine on a CPU: its tokens are those of `model.generate`, whatever runs beside; requests end as they should."""

import asyncio
import threading

import pytest
import torch
from tests.engine.eager_graphs import EagerGraphs
from tests.models import zoo

from tilewright import Engine
from tilewright.engine import SamplingParams
from tilewright.engine.runner import Runner
from tilewright.errors import InputError, TilewrightError

SHORT = SamplingParams(max_tokens=16)
SIZES = {"max_batch": 3, "step_tokens": 16, "page_size": 4, "max_context": 96}


class Letters:
    """A tokenizer of one character a token; 'é' needs two tokens."""

    def __call__(self, text):
        return {"input_ids": [ord(letter) % zoo.VOCABULARY for letter in text]}

    def decode(self, tokens, skip_special_tokens):
        text = "".join(chr(97 + token % 26) if token % 5 else "(" for token in tokens)
        return text.replace("((", "é").replace("(", "\ufffd")


@pytest.fixture(scope="module")
def model():
    return silent(zoo.build("llama"))


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, Letters(), **SIZES) as engine:
        yield engine


def silent(model):
    """`model`, which never ends by itself."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompt(length, seed=0):
    return zoo.tokens(1, length, seed)[0].tolist()


def expected(model, tokens, count):
    return model.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False)[0, len(tokens) :].tolist()


@pytest.mark.parametrize("name", ["gemma2", "mistral", "gpt_oss", "deepseek_v2", "mixtral"])
def test_greedy_tokens_are_those_of_generate(name):
    model = silent(zoo.build(name))  # windows and soft caps, windows, sinks, keys wider than values, experts
    prompts = [prompt(length) for length in (3, 20, 37)]
    with Engine(model, **SIZES) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=12))
    assert [o.tokens for o in outputs] == [expected(model, p, 12) for p in prompts]
    assert model.config._attn_implementation != "tilewright_pages", "the model is as before"


def test_short_pages_chunks_and_shared_prefixes_change_nothing(model):
    prompts = [prompt(40), [*prompt(40)[:32], 5], prompt(17, 1), prompt(1, 2), prompt(30, 3), prompt(40)]
    with Engine(model, cache_tokens=80, **SIZES) as engine:
        for _ in range(2):
            outputs = engine.generate(prompts, SamplingParams(max_tokens=30))
            assert [o.tokens for o in outputs] == [expected(model, p, 30) for p in prompts]
        assert engine.statistics["preemptions"] > 0
        assert engine.statistics["pages_held"] == engine.statistics["running"] == engine.statistics["waiting"] == 0


@pytest.mark.parametrize("captures", [True, False])
def test_parts_of_prompts_are_graphs_of_a_few_shapes(model, monkeypatch, captures):
    monkeypatch.setattr(Runner, "_wait", lambda runner: None)
    prompts = [prompt(length) for length in (3, 20, 37, 5, 12)]
    with Engine(model, **SIZES | {"step_tokens": 24}) as engine:
        graphs = engine._runner._graphs = EagerGraphs(lambda step: captures or step.tokens == step.rows)
        outputs = engine.generate(prompts, SHORT)
    assert [o.tokens for o in outputs] == [expected(model, p, 16) for p in prompts]
    assert {step.tokens for step in graphs if step.tokens != step.rows} == ({16, 24} if captures else set())
    assert any(step.is_decode for step in graphs)


def test_a_known_prefix_is_not_computed_again(model):
    with Engine(model, **SIZES) as engine:
        first, second = (engine.generate(prompt(40), SamplingParams(max_tokens=8))[0] for _ in range(2))
    assert (first.reused, second.reused) == (0, 36)
    assert second.tokens == first.tokens


def test_drawn_tokens_do_not_depend_on_the_company(engine):
    params = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=5, max_tokens=20, logprobs=True)
    alone = engine.generate(prompt(9), params)[0]
    company = engine.generate([prompt(21, 1), prompt(9), prompt(2, 2)], [SHORT, params, SHORT])[1]
    assert company.tokens == alone.tokens
    assert company.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    other = engine.generate(prompt(9), SamplingParams(temperature=0.9, seed=6, max_tokens=20))[0]
    assert other.tokens != alone.tokens


def test_log_probabilities_are_those_of_the_model(engine, model):
    (output,) = engine.generate([prompt(7)], SamplingParams(max_tokens=5, logprobs=True))
    with torch.no_grad():
        logits = model(torch.tensor([prompt(7) + output.tokens])).logits[0].log_softmax(-1)
    wanted = [logits[6 + i, token].item() for i, token in enumerate(output.tokens)]
    assert output.logprobs == pytest.approx(wanted, abs=1e-4)


def test_stop_tokens_end_a_request(engine, model):
    tokens = expected(model, prompt(7), 12)
    stop = tokens[5]
    (output,) = engine.generate([prompt(7)], SamplingParams(max_tokens=12, stop_tokens=(stop,)))
    assert output.tokens == tokens[: tokens.index(stop) + 1]
    assert output.reason == "stop"


def test_the_models_end_of_text_ends_a_request_unless_ignored():
    model = silent(zoo.build("llama"))
    tokens = expected(model, prompt(7), 12)
    model.generation_config.eos_token_id = [tokens[3]]
    with Engine(model, **SIZES) as engine:
        ends = engine.generate(prompt(7), SamplingParams(max_tokens=12))[0]
        goes_on = engine.generate(prompt(7), SamplingParams(max_tokens=12, ignore_eos=True))[0]
    assert ends.tokens == tokens[: tokens.index(tokens[3]) + 1]
    assert goes_on.tokens == tokens


def test_pieces_are_the_text_of_the_result(engine):
    params = SamplingParams(max_tokens=40)
    (output,) = engine.generate("a question", params)
    pieces = list(engine.stream("a question", params))
    assert "".join(piece.text for piece in pieces) == output.text
    assert [piece.token for piece in pieces if piece.token >= 0] == output.tokens


def test_asynchronous_pieces(engine):
    async def pieces():
        return [
            piece.token async for piece in engine.submit(prompt(5), SamplingParams(max_tokens=9)) if piece.token >= 0
        ]

    async def both():
        return await asyncio.gather(pieces(), pieces())

    first, second = asyncio.run(both())
    assert first == second == engine.generate(prompt(5), SamplingParams(max_tokens=9))[0].tokens


def test_any_thread_may_ask(engine, model):
    results = {}

    def ask(n):
        results[n] = engine.generate(prompt(5 + n, n), SamplingParams(max_tokens=10))[0].tokens

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: expected(model, prompt(5 + n, n), 10) for n in range(6)}


def test_a_cancelled_request_ends_and_others_go_on(engine, model):
    long, other = (engine.submit(prompt(5, n), SamplingParams(max_tokens=90)) for n in range(2))
    next(iter(long))
    long.cancel()
    output = long.result(timeout=60)
    assert output.reason == "cancelled" and 1 <= len(output.tokens) < 90
    assert other.result(timeout=60).tokens == expected(model, prompt(5, 1), 90)
    pieces = engine.stream(prompt(5), SamplingParams(max_tokens=90))
    assert next(pieces).token == output.tokens[0]
    pieces.close()  # as leaving a loop does
    assert engine.generate(prompt(5), SHORT)[0].tokens == expected(model, prompt(5), SHORT.max_tokens)


@pytest.mark.parametrize(
    ("tokens", "params", "match"),
    [
        ([], {}, "no tokens"),
        ([zoo.VOCABULARY], {}, "the vocabulary has 128"),
        ([-1], {}, "the vocabulary has 128"),
        ([3] * 90, {"max_tokens": 7}, "90 prompt tokens and 7 new ones exceed the 96"),
    ],
)
def test_what_does_not_fit_is_refused(engine, tokens, params, match):
    with pytest.raises(InputError, match=match):
        engine.submit(tokens, SamplingParams(**params))


def test_a_request_must_fit_the_cache_alone(model):
    with Engine(model, cache_tokens=32, **SIZES) as engine, pytest.raises(InputError, match="exceed the 32"):
        engine.submit(prompt(20), SamplingParams(max_tokens=13))


def test_text_needs_a_tokenizer(model):
    with Engine(model, **SIZES) as engine, pytest.raises(InputError, match="needs a tokenizer"):
        engine.submit("text")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"max_batch": 0}, "max_batch is 0"),
        ({"max_context": 4096}, "this model takes 2 to 128"),
        ({"cache_tokens": 3}, "less than a page"),
        ({"graphs": True}, "needs a CUDA device"),
    ],
)
def test_sizes_are_checked(model, change, match):
    with pytest.raises(InputError, match=match):
        Engine(model, **SIZES | change)


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(InputError, match="training mode"):
        Engine(zoo.build("llama").train(), **SIZES)


def test_after_close_nothing_is_taken_and_what_runs_is_cancelled(model):
    engine = Engine(model, **SIZES)
    generation = engine.submit(prompt(5), SamplingParams(max_tokens=90))
    engine.close()
    engine.close()
    assert generation.result(timeout=60).reason in ("cancelled", "length")
    with pytest.raises(InputError, match="closed"):
        engine.submit(prompt(5), SHORT)


def test_an_error_of_the_model_reaches_those_who_wait():
    model = silent(zoo.build("llama"))
    with Engine(model, **SIZES) as engine:
        model.model.norm.register_forward_hook(lambda *args: (_ for _ in ()).throw(RuntimeError("broken layer")))
        generation = engine.submit(prompt(5), SHORT)
        with pytest.raises(TilewrightError, match="broken layer"):
            generation.result(timeout=60)
        with pytest.raises(InputError, match="stopped after an error: broken layer"):
            engine.submit(prompt(5), SHORT)


def test_nan_fails_the_request_that_has_it_and_no_other():
    model = silent(zoo.build("llama"))
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("nan")
        model.lm_head.weight[7] = 0
    with Engine(model, **SIZES) as engine:
        bad, good = engine.submit([7, 7, 7], SHORT), engine.submit([8, 9], SHORT)
        with pytest.raises(TilewrightError, match="request failed: .*NaN"):
            bad.result(timeout=60)
        assert len(good.result(timeout=60).tokens) == SHORT.max_tokens


def test_a_result_that_takes_longer_is_a_timeout_and_goes_on(engine):
    generation = engine.submit(prompt(5), SamplingParams(max_tokens=60))
    with pytest.raises(TimeoutError):
        generation.result(timeout=0)
    assert len(generation.result(timeout=60).tokens) == 60


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3"])
def test_a_prefix_hit_gives_the_same_bits_as_a_miss(name):
    model = silent(zoo.build(name))
    prompts, params = [prompt(40), [*prompt(40)[:32], 5, 6]], SamplingParams(max_tokens=12, logprobs=True)
    with Engine(model, **SIZES) as engine:  # a miss computes 16, 16 and 2 tokens, and a hit the last 2
        (miss,) = engine.generate(prompts[1:], params)
    with Engine(model, **SIZES) as engine:
        hit = [engine.generate(each, params)[0] for each in prompts][1]
    assert (miss.reused, hit.reused) == (0, 32)
    assert (hit.tokens, hit.logprobs) == (miss.tokens, miss.logprobs)
