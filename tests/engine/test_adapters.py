"""LoRA adapters: a request's tokens are those of the model with its adapter merged, whatever runs beside it."""

import copy
import json
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.engine.eager_graphs import EagerGraphs
from tests.engine.test_engine import SIZES, prompt, silent
from tests.engine.test_speculation import REPEATED
from tests.models import zoo

from tilewright import Engine
from tilewright.engine import SamplingParams
from tilewright.engine.runner import Runner
from tilewright.errors import InputError

ROOT = Path(__file__).parents[2]
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter(model, rank, seed, layers=ALL, **config):
    """Config and tensors of an adapter with an effect."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in layers:
            key = f"base_model.model.{path}.lora_"
            tensors[f"{key}A.weight"] = torch.randn(rank, module.in_features, generator=generator) / rank
            tensors[f"{key}B.weight"] = 0.05 * torch.randn(module.out_features, rank, generator=generator)
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **config}, tensors


def merged(model, source, scale=2.0):
    """`model` with s * B @ A added to its weights."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for key in source[1]:
            if key.endswith("lora_A.weight"):
                path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                model.get_submodule(path).weight += scale * source[1][key.replace("lora_A", "lora_B")] @ source[1][key]
    return model


@pytest.fixture(scope="module")
def model():
    return silent(zoo.build("llama"))


@pytest.fixture(scope="module")
def sources(model):
    return {"all": adapter(model, 4, 1), "some": adapter(model, 3, 2, ("q_proj", "down_proj"))}


EACH = [
    (prompt(21), SamplingParams(max_tokens=14)),
    (prompt(21), SamplingParams(max_tokens=14, adapter="all")),
    (prompt(21), SamplingParams(max_tokens=14, adapter="some", logprobs=True, top_logprobs=2)),
    (REPEATED, SamplingParams(max_tokens=14, adapter="all", temperature=0.8, seed=3)),
    (REPEATED, SamplingParams(max_tokens=14, adapter="some", frequency_penalty=0.5, prompt_logprobs=True)),
]


@pytest.fixture(scope="module")
def wanted(model, sources):
    """What engines of the merged models answer."""
    models = {None: model} | {name: merged(model, source) for name, source in sources.items()}
    outputs = {}
    for name, its in models.items():
        with Engine(its, **SIZES) as engine:
            for n, (tokens, params) in enumerate(EACH):
                if params.adapter == name:
                    without = SamplingParams(**{**vars(params), "adapter": None})
                    outputs[n] = engine.generate(tokens, without)[0]
    assert len({tuple(outputs[n].tokens) for n in range(3)}) == 3, "adapters have an effect"
    return [outputs[n] for n in range(len(EACH))]


def same(outputs, wanted):
    for output, its in zip(outputs, wanted, strict=True):
        assert output.tokens == its.tokens
        for name in ("logprobs", "prompt_logprobs"):
            values = getattr(its, name)
            assert getattr(output, name) == (None if values is None else pytest.approx(values, abs=1e-4))


@pytest.mark.parametrize("speculation", [None, "prompt_lookup", "draft_model"])
def test_tokens_are_those_of_the_merged_models(model, sources, wanted, speculation):
    before = copy.deepcopy(model.state_dict())
    options = {"draft_model": model} if speculation == "draft_model" else {"speculation": speculation}
    with Engine(model, adapters=sources, cache_tokens=64, **options, **SIZES) as engine:
        for _ in range(2):
            same(engine.generate(*zip(*EACH, strict=True)), wanted)
        assert engine.statistics["preemptions"] > 0 == engine.statistics["pages_held"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_adapters_share_no_prefix(model, sources):
    with Engine(model, adapters=sources, **SIZES) as engine:
        reused = [
            engine.generate(prompt(21), SamplingParams(max_tokens=1, adapter=name))[0].reused
            for name in ("all", "some", None, "all", "some", None)
        ]
        assert reused == [0, 0, 0, 20, 20, 20]


def test_padded_steps_change_nothing(model, sources, wanted, monkeypatch):
    monkeypatch.setattr(Runner, "_wait", lambda runner: None)
    with Engine(model, adapters=sources, **SIZES) as engine:
        engine._runner._graphs = EagerGraphs()
        same(engine.generate(*zip(*EACH, strict=True)), wanted)


def test_the_trained_model_answers_as_its_merged_copy():
    model, inputs = runpy.run_path(str(ROOT / "examples/stdlib_lm/factory.py"))["factory"]()
    source, tokens = adapter(model, 8, 0), inputs["input_ids"][0, :24].tolist()
    ids = torch.tensor([tokens])
    expected = merged(model, source).generate(ids, max_new_tokens=12, do_sample=False)[0, 24:].tolist()
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)[0, 24:].tolist()
    assert plain != expected
    each = [SamplingParams(max_tokens=12, adapter=name) for name in (None, "one")]
    with Engine(model, adapters={"one": source}, max_batch=2, max_context=64) as engine:
        assert [output.tokens for output in engine.generate([tokens] * 2, each)] == [plain, expected]


def test_a_folder_and_the_scales_that_its_config_gives(model, tmp_path):
    config, tensors = adapter(model, 4, 5, ("q_proj",), use_rslora=True, lora_alpha=6)
    config |= {"alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 0}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    first = config, {key: tensor for key, tensor in tensors.items() if "layers.0" in key}
    with Engine(merged(model, first, 6 / 4**0.5), **SIZES) as engine:
        expected = engine.generate(prompt(9), SamplingParams(max_tokens=12))[0].tokens
    with Engine(model, adapters={"folder": str(tmp_path)}, **SIZES) as engine:
        assert engine.generate(prompt(9), SamplingParams(max_tokens=12, adapter="folder"))[0].tokens == expected


def _with(source, config=None, **tensors):
    key = "base_model.model.model.layers.0.self_attn."
    return source[0] | (config or {}), source[1] | {key + name.replace("__", "."): t for name, t in tensors.items()}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda its: "missing_folder", "needs missing_folder/adapter_config.json, which does not exist"),
        (lambda its: _with(its, {"use_dora": True}), "has use_dora=True, which an engine does not apply"),
        (lambda its: _with(its, {"peft_type": "IA3"}), "is of type IA3"),
        (lambda its: _with(its, {"r": 8}), r"needs A \(8, K\) and B \(N, 8\)"),
        (lambda its: (its[0], {}), "has no factors"),
        (lambda its: _with(its, q_proj__lora_A__bias=torch.zeros(4)), "q_proj.lora_A.bias, which is no factor"),
        (lambda its: _with(its, other__lora_A__weight=torch.zeros(4, 32)), r"has A \(4, 32\) for .*other; it needs"),
        (
            lambda its: _with(its, q_proj__lora_A__weight=torch.zeros(4, 5)),
            "has factors of 32 x 5 for .*; the layer is",
        ),
        (lambda its: _with(its, q_proj__lora_A__weight=torch.full((4, 32), torch.nan)), "q_proj that are not finite"),
    ],
)
def test_what_an_adapter_cannot_be_is_refused_by_name(model, sources, change, match):
    with pytest.raises(InputError, match=match):
        Engine(model, adapters={"bad": change(sources["all"])}, **SIZES)
    assert not any(module._forward_hooks for module in model.modules())


def test_layers_that_do_not_run_once_for_each_token_are_refused(model):
    with pytest.raises(InputError, match="lm_head has an adapter, and does not compute a row for each token"):
        Engine(model, adapters={"head": adapter(model, 2, 0, ("lm_head",))}, **SIZES)
    fused = copy.deepcopy(model)
    attention = fused.model.layers[0].mlp
    attention.forward = lambda x: torch.nn.functional.linear(attention.up_proj(x), attention.down_proj.weight)
    with pytest.raises(
        InputError, match=r"layers\.0\.mlp\.down_proj has an adapter, and its product was computed without"
    ):
        Engine(fused, adapters={"all": adapter(fused, 2, 0, ("down_proj",))}, **SIZES)
    assert not any(module._forward_hooks for module in fused.modules())


def test_a_name_that_is_not_known_is_refused(model, sources):
    match = "no adapter is named 'other'; this engine has all, some"
    with Engine(model, adapters=sources, **SIZES) as engine, pytest.raises(InputError, match=match):
        engine.submit(prompt(3), SamplingParams(max_tokens=9, adapter="other"))
    with Engine(model, **SIZES) as engine, pytest.raises(InputError, match="this engine has none"):
        engine.submit(prompt(3), SamplingParams(max_tokens=9, adapter="all"))
