"""The engine on a GPU: graphs, the step ahead, pages that change hands without a wait."""

import pytest
import torch
from tests.engine.test_adapters import adapter, merged
from tests.models import zoo

from tilewright import Engine
from tilewright.engine import SamplingParams

pytestmark = pytest.mark.gpu
SIZES = {"max_batch": 6, "step_tokens": 32, "page_size": 4, "max_context": 96}


def silent(name, **options):
    model = zoo.build(name, **options).cuda()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts(count=9):
    return [zoo.tokens(1, 3 + 5 * n, n)[0].tolist() for n in range(count)]


def expected(model, tokens, count):
    ids = torch.tensor([tokens], device="cuda")
    return model.generate(ids, max_new_tokens=count, do_sample=False)[0, len(tokens) :].tolist()


# Experts of transformers wait for the GPU, so that their steps are no graphs
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v2", "qwen3"])
@pytest.mark.parametrize("graphs", [True, False])
def test_greedy_tokens_are_those_of_generate(name, graphs):
    model = silent(name)
    has_experts = name in ("gpt_oss", "deepseek_v2")
    with Engine(model, graphs=None if graphs and has_experts else graphs, **SIZES) as engine:
        outputs = engine.generate(prompts(), SamplingParams(max_tokens=30))
    assert [o.tokens for o in outputs] == [expected(model, p, 30) for p in prompts()]


@pytest.mark.parametrize("options", [{}, {"speculation": "prompt_lookup"}])
def test_latents_in_graphs_are_those_of_generate(options):
    model = silent("deepseek_v3", first_k_dense_replace=2)  # no experts, so that graphs can be had
    wanted = [expected(model, p, 30) for p in prompts()]
    with Engine(model, graphs=True, cache_tokens=160, **options, **SIZES) as engine:
        engine.warmup()
        for _ in range(2):
            assert [o.tokens for o in engine.generate(prompts(), SamplingParams(max_tokens=30))] == wanted


def test_parts_of_prompts_are_graphs():
    model = silent("llama")
    with Engine(model, graphs=True, **SIZES) as engine:
        engine.warmup()
        captured = set(engine._runner._graphs._graphs)
        outputs = engine.generate(prompts(), SamplingParams(max_tokens=30))
        assert set(engine._runner._graphs._graphs) == captured
    assert {step.tokens for step in captured if step.tokens != step.rows} == {16, 24, 32}
    assert [o.tokens for o in outputs] == [expected(model, p, 30) for p in prompts()]


def test_short_pages_and_shared_prefixes_change_nothing():
    model = silent("llama")
    asked = [*prompts(), *prompts()[4:]]
    wanted = [expected(model, p, 40) for p in asked]
    with Engine(model, cache_tokens=128, **SIZES) as engine:
        engine.warmup()
        for _ in range(2):
            outputs = engine.generate(asked, SamplingParams(max_tokens=40))
            assert [o.tokens for o in outputs] == wanted
        assert engine.statistics["preemptions"] > 0


def test_drawn_tokens_repeat_in_other_company():
    model = silent("llama")
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=30)
    with Engine(model, **SIZES) as engine:
        alone = engine.generate(prompts()[3], params)[0].tokens
        company = engine.generate(prompts(6), [params] * 6)[3].tokens
    assert alone == company


def test_end_of_text_and_cancelling_while_a_step_is_ahead():
    model = silent("llama")
    tokens = expected(model, prompts()[2], 30)
    wanted = [expected(model, prompt, 40) for prompt in prompts(5)]
    with Engine(model, **SIZES) as engine:
        running = [engine.submit(p, SamplingParams(max_tokens=40)) for p in prompts(5)]
        stopped = engine.submit(prompts()[2], SamplingParams(max_tokens=30, stop_tokens=(tokens[9],)))
        next(iter(running[0]))
        running[0].cancel()
        assert stopped.result(60).tokens == tokens[: tokens.index(tokens[9]) + 1]
        assert running[0].result(60).reason == "cancelled"
        assert [generation.result(60).tokens for generation in running[1:]] == wanted[1:]


def test_penalties_in_graphs_and_one_step_ahead_are_those_of_one_request():
    model = silent("llama")
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "logit_bias": {5: 1.0}, "min_tokens": 7}
    each = [SamplingParams(max_tokens=40, **penalties if n % 2 else {}) for n in range(9)]
    with Engine(model, graphs=False, **SIZES) as engine:
        alone = [engine.generate(p, params)[0].tokens for p, params in zip(prompts(), each, strict=True)]
    with Engine(model, graphs=True, cache_tokens=128, **SIZES) as engine:
        assert [output.tokens for output in engine.generate(prompts(), each)] == alone
        assert engine.statistics["preemptions"] > 0


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
def test_speculated_tokens_are_those_without(kv_dtype):
    model = silent("llama")
    each = [
        SamplingParams(max_tokens=40, temperature=0.3 * (n % 3), seed=n, frequency_penalty=-0.4 * (n % 2), min_tokens=n)
        for n in range(9)
    ]
    repeated = [p[:6] * 4 for p in prompts()]
    with Engine(model, graphs=True, kv_dtype=kv_dtype, **SIZES) as engine:
        plain = engine.generate(repeated, each)
    with Engine(model, graphs=True, kv_dtype=kv_dtype, speculation="prompt_lookup", **SIZES) as engine:
        engine.warmup()
        outputs = engine.generate(repeated, each)
    assert [output.tokens for output in outputs] == [output.tokens for output in plain]


@pytest.mark.parametrize("graphs", [True, False])
def test_tokens_with_a_draft_model_are_those_without(graphs):
    model = silent("llama")
    each = [
        SamplingParams(max_tokens=40, temperature=0.3 * (n % 3), seed=n, presence_penalty=0.2 * (n % 4 == 3))
        for n in range(9)
    ]
    with Engine(model, graphs=graphs, **SIZES) as engine:
        plain = engine.generate(prompts(), each)
    for draft in (model, silent("qwen3")):
        with Engine(model, graphs=graphs, draft_model=draft, cache_tokens=160, **SIZES) as engine:
            engine.warmup()
            outputs = engine.generate(prompts(), each)
            statistics = engine.statistics
        assert [output.tokens for output in outputs] == [output.tokens for output in plain]
        assert statistics["pages_held"] == 0 < statistics["draft_tokens"]
    assert statistics["accepted_tokens"] < statistics["draft_tokens"]


def test_adapters_in_graphs_are_merged_models():
    model = zoo.build("llama")
    sources = {"one": adapter(model, 4, 1), "two": adapter(model, 8, 2)}
    models = [each.cuda() for each in (model, merged(model, sources["one"]), merged(model, sources["two"]))]
    for each in models:
        each.generation_config.eos_token_id, each.generation_config.pad_token_id = None, 0
    names = [(None, "one", "two")[n % 3] for n in range(9)]
    with Engine(models[0], graphs=True, adapters=sources, **SIZES) as engine:
        engine.warmup()
        outputs = engine.generate(prompts(), [SamplingParams(max_tokens=30, adapter=name) for name in names])
    assert [output.tokens for output in outputs] == [
        expected(models[n % 3], tokens, 30) for n, tokens in enumerate(prompts())
    ]
