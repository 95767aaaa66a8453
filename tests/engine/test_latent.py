"""Caches of latents: tokens of DeepSeek V2 and V3 are those of `model.generate`, whatever runs beside."""

import pytest
import torch
from tests.engine.eager_graphs import EagerGraphs
from tests.engine.test_adapters import adapter, merged
from tests.engine.test_engine import SIZES, expected, prompt, silent
from tests.engine.test_speculation import REPEATED
from tests.models import zoo
from torch import nn

import tilewright
from tilewright import Engine
from tilewright.engine import SamplingParams
from tilewright.engine.latent import LatentShape, each_token
from tilewright.engine.model import Shape
from tilewright.engine.runner import Runner
from tilewright.errors import InputError

COUNT = 16
PROMPTS = [prompt(40), [*prompt(40)[:32], 5], REPEATED, prompt(1, 2)]
MANY = SamplingParams(max_tokens=COUNT)


@pytest.fixture(scope="module")
def model():
    return silent(zoo.build("deepseek_v3"))


@pytest.fixture(scope="module")
def wanted(model):
    return [expected(model, tokens, COUNT) for tokens in PROMPTS]


def tokens_of(engine, params=MANY):
    return [output.tokens for output in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize("is_patched", [False, True])
def test_greedy_tokens_are_those_of_generate(is_patched):
    model = silent(zoo.build("deepseek_v2"))
    wanted = [expected(model, tokens, COUNT) for tokens in PROMPTS]
    if is_patched:
        tilewright.patch(model)
    with Engine(model, **SIZES) as engine:
        assert engine._model.shapes == dict.fromkeys(range(2), LatentShape(16, 8, torch.float32))
        assert engine._model.bytes_per_token() == 2 * (16 + 8) * 4, "of 2 * 4 * (16 + 8) * 4 for keys and values"
        assert tokens_of(engine) == wanted
    assert [expected(model, tokens, COUNT) for tokens in PROMPTS] == wanted, "the model is as before"


@pytest.mark.parametrize("speculation", [{}, {"speculation": "prompt_lookup"}, {"draft_model": "llama"}])
def test_short_pages_shared_prefixes_and_drafts_change_nothing(model, wanted, speculation):
    options = {**speculation, **({"draft_model": zoo.build("llama")} if "draft_model" in speculation else {})}
    with Engine(model, cache_tokens=64, **options, **SIZES) as engine:
        for _ in range(2):
            assert tokens_of(engine) == wanted
        assert engine.statistics["preemptions"] > 0 == engine.statistics["pages_held"]


def test_a_model_of_latents_as_its_own_draft_is_always_right(model, wanted):
    with Engine(model, draft_model=model, **SIZES) as engine:
        assert tokens_of(engine) == wanted
        assert engine.statistics["accepted_tokens"] == engine.statistics["draft_tokens"] > 20


def test_padded_steps_change_nothing(model, wanted, monkeypatch):
    monkeypatch.setattr(Runner, "_wait", lambda runner: None)
    with Engine(model, speculation="prompt_lookup", **SIZES) as engine:
        graphs = engine._runner._graphs = EagerGraphs()
        engine.warmup()
        assert tokens_of(engine) == wanted
    assert any(step.drafts for step in graphs) and any(step.tokens != step.rows for step in graphs)


def test_adapters_are_merged_models_and_none_changes_the_projection(model):
    source = adapter(model, 4, 1, ("q_b_proj", "kv_a_proj_with_mqa", "o_proj"))
    other = silent(merged(model, source))
    with Engine(model, adapters={"fine": source}, **SIZES) as engine:
        its = tokens_of(engine, SamplingParams(max_tokens=12, adapter="fine"))
    assert its == [expected(other, tokens, 12) for tokens in PROMPTS]
    with pytest.raises(InputError, match=r"0\.self_attn\.kv_b_proj has an adapter, .* a cache of latents"):
        Engine(model, adapters={"fine": adapter(model, 4, 1, ("kv_b_proj",))}, **SIZES)


def test_a_float8_cache_is_of_656_bytes_and_near():
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "num_hidden_layers": 1}
    model = silent(zoo.build("deepseek_v3", **sizes))
    with Engine(model, kv_dtype=torch.float8_e4m3fn, **SIZES) as engine:
        assert engine._model.bytes_per_token(torch.float8_e4m3fn) == 656
        (output,) = engine.generate([prompt(40)], SamplingParams(max_tokens=8, logprobs=True))
    with torch.no_grad():
        logits = model(torch.tensor([prompt(40) + output.tokens])).logits[0].log_softmax(-1)
    exact = [logits[39 + i, token].item() for i, token in enumerate(output.tokens)]
    assert output.logprobs == pytest.approx(exact, abs=0.1)
    assert output.logprobs != pytest.approx(exact, abs=1e-6), "latents are in float8"


def test_latents_of_other_sizes_have_no_float8(model):
    with pytest.raises(InputError, match=r"latents of 16 \+ 8 numbers have no such form, those of 512 \+ 64 do"):
        Engine(model, kv_dtype=torch.float8_e4m3fn, **SIZES)


class Scaled(nn.Linear):
    """A projection whose weight is not all of it, as of quantised ones."""

    def forward(self, input):
        return 2 * super().forward(input)


def test_a_projection_that_is_no_plain_product_leaves_keys():
    model = silent(zoo.build("deepseek_v3"))
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = Scaled
    with Engine(model, **SIZES) as engine:
        assert engine._model.shapes == dict.fromkeys(range(2), Shape((4, 16), (4, 8), torch.float32))
        assert tokens_of(engine) == [expected(model, tokens, COUNT) for tokens in PROMPTS]


def test_a_window_over_latents_is_refused(monkeypatch):
    model = silent(zoo.build("deepseek_v3"))
    attention = type(model.model.layers[0].self_attn)
    forward = attention.forward
    monkeypatch.setattr(attention, "forward", lambda self, *args, **kw: forward(self, *args, sliding_window=4, **kw))
    with pytest.raises(InputError, match="latent attention with sliding_window"):
        Engine(model, **SIZES)


def test_every_token_is_a_sequence_up_to_itself():
    table = torch.tensor([[7, 8], [3, 4], [0, 0]], dtype=torch.int32)
    cu_seqlens = torch.tensor([0, 2, 3, 3], dtype=torch.int32)  # the third is padding, and so is the last token
    its = each_token(torch.tensor([4, 5, 9, 0]), cu_seqlens, table)
    assert its.lengths.tolist() == [5, 6, 10, 0]
    assert its.block_table[:3].tolist() == [[7, 8], [7, 8], [3, 4]]
