"""Tables have the bits of Hugging Face's rotary modules, for every rope_type and parameter."""

import math
from types import SimpleNamespace

import pytest
import torch

from tilewright.errors import InputError
from tilewright.ops.rope.tables import TYPES, RopeConfig, frequencies, inverse_frequencies, rope_table

HEAD_DIM, LENGTH = 64, 512
TRAINED = {"original_max_position_embeddings": 128}
LONG = {"short_factor": [1.0 + i / 40 for i in range(32)], "long_factor": [1.0 + i / 4 for i in range(32)]}
HALF_LONG = {name: factors[:16] for name, factors in LONG.items()}

# What is asked, and the rope_parameters that ask it.
CASES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear, partial": {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic, partial": {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.25},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **TRAINED},
    "yarn, partial": {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5, **TRAINED},
    "yarn, given attention": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.75, **TRAINED},
    "yarn, mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7, **TRAINED},
    "yarn, betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, **TRAINED},
    "yarn, not truncated": {"rope_type": "yarn", "factor": 4.0, "truncate": False, **TRAINED},
    "yarn, all in one pair": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e9, "beta_slow": 1e8, **TRAINED},
    "yarn, factor from lengths": {"rope_type": "yarn", "factor": None, **TRAINED},
    "yarn, no extension": {"rope_type": "yarn", "factor": 1.0, **TRAINED},
    "longrope": {"rope_type": "longrope", "factor": 4.0, **LONG, **TRAINED},
    "longrope, factor from lengths": {"rope_type": "longrope", **LONG, **TRAINED},
    "longrope, partial": {"rope_type": "longrope", "partial_rotary_factor": 0.5, **HALF_LONG, **TRAINED},
    "longrope, given attention": {"rope_type": "longrope", "attention_factor": 1.2, **LONG, **TRAINED},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "proportional, factor": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 8.0},
    "proportional, all": {"rope_type": "proportional"},
}


def config_of(parameters, theta=10_000.0):
    """A Hugging Face configuration; they complain in the log, not by exceptions, about odd parameters."""
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaConfig(
        head_dim=HEAD_DIM, max_position_embeddings=LENGTH, rope_parameters={"rope_theta": theta, **parameters}
    )


def hugging_face(config, length=None):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.glm.modeling_glm import GlmRotaryEmbedding

    kind = config.rope_parameters["rope_type"]
    function = GlmRotaryEmbedding.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    return function(config, torch.device("cpu"), seq_len=length)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("length", [None, 64, LENGTH, 3000])
@pytest.mark.parametrize("case", CASES)
def test_frequencies(case, length, theta):
    config = config_of(CASES[case], theta)
    turns, attention_factor = frequencies(config, length=length)
    wanted, wanted_factor = hugging_face(config, length)
    assert torch.equal(turns, wanted)
    assert attention_factor == wanted_factor


def test_every_type_is_compared():
    assert {parameters["rope_type"] for parameters in CASES.values()} == set(TYPES)
    transformers = pytest.importorskip("transformers")
    assert set(TYPES) == {"default", *transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["default", "linear", "yarn", "llama3", "longrope"])
def test_table(case, dtype):
    """The rotary module of the model, asked for positions 0 to LENGTH - 1."""
    config = config_of(CASES[case])
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    wanted = LlamaRotaryEmbedding(config)(torch.empty(0, dtype=dtype), torch.arange(LENGTH)[None])
    for ours, theirs in zip(rope_table(config, dtype=dtype), wanted, strict=True):
        assert ours.shape == (LENGTH, HEAD_DIM)
        assert torch.equal(ours, theirs[0])


@pytest.mark.parametrize("length", [LENGTH, LENGTH + 1, 4 * LENGTH])
def test_dynamic_table_grows_as_the_module_does(length):
    config = config_of(CASES["dynamic"])
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0), torch.arange(length)[None])
    ours = rope_table(config, length=length)
    torch.testing.assert_close(ours[0], cos[0], rtol=0, atol=1e-4)  # theirs takes the base from a float32 tensor
    torch.testing.assert_close(ours[1], sin[0], rtol=0, atol=1e-4)


def test_one_set_of_parameters_for_each_type_of_layer():
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig(head_dim=HEAD_DIM, max_position_embeddings=LENGTH)
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    module = Gemma3RotaryEmbedding(config)
    tables = {}
    for layer_type in sorted(set(config.layer_types)):
        cos, sin = module(torch.empty(0), torch.arange(LENGTH)[None], layer_type)
        tables[layer_type] = rope_table(config, layer_type=layer_type)
        assert torch.equal(tables[layer_type][0], cos[0])
        assert torch.equal(tables[layer_type][1], sin[0])
    assert not torch.equal(tables["full_attention"][0], tables["sliding_attention"][0])


def test_without_a_hugging_face_config():
    parameters = {"rope_theta": 10_000.0, **CASES["llama3"]}
    ours = rope_table(RopeConfig(HEAD_DIM, LENGTH, parameters), length=40)
    theirs = rope_table(config_of(parameters), length=40)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert ours[0].shape == (40, HEAD_DIM)


def test_head_dim_may_follow_from_hidden_size():
    config = SimpleNamespace(hidden_size=256, num_attention_heads=4, max_position_embeddings=8, rope_parameters={})
    assert rope_table(config)[0].shape == (8, 64)


def test_the_first_pair_turns_a_radian_a_token_and_columns_repeat():
    cos, sin = rope_table(RopeConfig(8, 4, {"rope_theta": 100.0}))
    assert sin[3, 0].item() == pytest.approx(math.sin(3.0))
    assert cos[3, 1].item() == pytest.approx(math.cos(3.0 * 100.0 ** (-2 / 8)))
    assert torch.equal(cos[:, :4], cos[:, 4:])
    assert torch.equal(inverse_frequencies(8, 100.0), frequencies(RopeConfig(8, 4, {"rope_theta": 100.0}))[0])


def test_unknown_type():
    with pytest.raises(InputError, match="rope_type is 'spiral'; needs one of default, linear"):
        rope_table(RopeConfig(64, 8, {"rope_type": "spiral"}))


def test_missing_parameter():
    with pytest.raises(InputError, match="'llama3' needs low_freq_factor, high_freq_factor in rope_parameters"):
        rope_table(RopeConfig(64, 8, {"rope_type": "llama3", "factor": 8.0, **TRAINED}))
