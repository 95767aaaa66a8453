"""Modules against the ones they stand in for: same state_dict, same numbers, same gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilewright.errors import InputError
from tilewright.nn import AddRMSNorm, GeGLUMLP, GroupNorm, LayerNorm, RMSNorm, RotaryEmbedding, SwiGLUMLP
from tilewright.ops.rope.tables import RopeConfig

HIDDEN, INNER = 32, 48


def hf(name: str) -> Any:
    """(Config, module prefix) parts of transformers' Llama-like and Gemma-like files."""
    import transformers.models.gemma.modeling_gemma as gemma
    import transformers.models.gpt_oss.modeling_gpt_oss as gpt_oss
    import transformers.models.llama.modeling_llama as llama

    return {"llama": llama, "gemma": gemma, "gpt_oss": gpt_oss}[name]


def llama_config(**options: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 2, "max_position_embeddings": 64}
    return LlamaConfig(**{**sizes, **options})


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "rms_norm/llama": (lambda: RMSNorm(HIDDEN, 1e-5), lambda: hf("llama").LlamaRMSNorm(HIDDEN, 1e-5)),
    "rms_norm/gemma": (lambda: RMSNorm(HIDDEN, offset=1.0), lambda: hf("gemma").GemmaRMSNorm(HIDDEN)),
    "rms_norm/gpt_oss": (lambda: RMSNorm(HIDDEN, fp32_weight=True), lambda: hf("gpt_oss").GptOssRMSNorm(HIDDEN)),
    "layer_norm": (lambda: LayerNorm(HIDDEN), lambda: nn.LayerNorm(HIDDEN)),
    "layer_norm/no_bias": (lambda: LayerNorm(HIDDEN, bias=False), lambda: nn.LayerNorm(HIDDEN, bias=False)),
    "group_norm": (lambda: GroupNorm(5, 5), lambda: nn.GroupNorm(5, 5)),
    "group_norm/no_affine": (lambda: GroupNorm(1, 5, 1e-3, False), lambda: nn.GroupNorm(1, 5, 1e-3, False)),
    "swiglu": (lambda: SwiGLUMLP(HIDDEN, INNER), lambda: hf("llama").LlamaMLP(llama_config())),
    "swiglu/bias": (
        lambda: SwiGLUMLP(HIDDEN, INNER, bias=True),
        lambda: hf("llama").LlamaMLP(llama_config(mlp_bias=True)),
    ),
    "geglu": (
        lambda: GeGLUMLP(HIDDEN, INNER),
        lambda: hf("llama").LlamaMLP(llama_config(hidden_act="gelu_pytorch_tanh")),
    ),
    "geglu/exact": (
        lambda: GeGLUMLP(HIDDEN, INNER, approximate="none"),
        lambda: hf("llama").LlamaMLP(llama_config(hidden_act="gelu")),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_drop_in(case: str, dtype: torch.dtype) -> None:
    make_ours, make_theirs = CASES[case]
    theirs = randomised(make_theirs().to(dtype))
    ours = make_ours().to(dtype)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())

    x = torch.randn(3, 5, HIDDEN, dtype=dtype)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    got, expected = ours(xs[0]), theirs(xs[1])
    torch.testing.assert_close(got, expected)
    cotangent = torch.randn_like(expected)
    got.backward(cotangent)
    expected.backward(cotangent)
    for g, e in zip([xs[0], *ours.parameters()], [xs[1], *theirs.parameters()], strict=True):
        torch.testing.assert_close(g.grad, e.grad, rtol=3e-2 if dtype is torch.bfloat16 else 1e-4, atol=3e-2)


@pytest.mark.parametrize("case", CASES)
def test_initialised_as_the_original(case: str) -> None:
    """A fresh norm scales by one, whatever its offset; a fresh MLP is drawn as torch.nn.Linear draws."""
    torch.manual_seed(3)
    ours = CASES[case][0]()
    torch.manual_seed(3)
    theirs = CASES[case][1]()
    for got, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("options", [{}, {"offset": 1.0}, {"fp32_weight": True}])
def test_add_rms_norm_is_add_then_norm(options: dict[str, Any]) -> None:
    fused, norm = AddRMSNorm(HIDDEN, **options), RMSNorm(HIDDEN, **options)
    norm.load_state_dict(randomised(fused).state_dict())
    x, residual = torch.randn(2, 4, HIDDEN), torch.randn(2, 4, HIDDEN)
    y, total = fused(x, residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, norm(x + residual))


ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
}


def rotated_by_llama(parameters: dict[str, Any], q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    llama = hf("llama")
    table = llama.LlamaRotaryEmbedding(llama_config(rope_parameters=parameters))
    return llama.apply_rotary_pos_emb(q, k, *table(q, positions))


@pytest.mark.parametrize("kind", ROPE)
def test_rotary_as_llama(kind: str) -> None:
    q, k = torch.randn(2, 4, 20, 16), torch.randn(2, 2, 20, 16)
    positions = torch.arange(20)[None]
    rotary = RotaryEmbedding(RopeConfig(16, 64, ROPE[kind]))
    assert not rotary.state_dict()
    expected = rotated_by_llama(ROPE[kind], q, k, positions)
    torch.testing.assert_close(rotary(q, k), expected)
    shuffled = torch.stack([torch.randperm(64)[:20] for _ in range(2)])
    torch.testing.assert_close(rotary(q, k, shuffled), rotated_by_llama(ROPE[kind], q, k, shuffled))


def test_rotary_takes_a_transformers_config() -> None:
    q, k = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16)
    got = RotaryEmbedding(llama_config(rope_parameters=ROPE["llama3"]))(q, k)
    torch.testing.assert_close(got, rotated_by_llama(ROPE["llama3"], q, k, torch.arange(8)[None]))


def test_rotary_in_bf16_rounds_its_tables_as_transformers_does() -> None:
    q, k = (torch.randn(1, 2, 8, 16, dtype=torch.bfloat16) for _ in range(2))
    got = RotaryEmbedding(RopeConfig(16, 64, ROPE["default"])).bfloat16()(q, k)
    expected = rotated_by_llama(ROPE["default"], q, k, torch.arange(8)[None])
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_rotary_refuses_what_is_longer_than_its_tables() -> None:
    q = torch.randn(1, 2, 65, 16)
    with pytest.raises(InputError, match=r"q has 65 tokens, the tables 64 rows. Make them with length=65"):
        RotaryEmbedding(RopeConfig(16, 64, ROPE["default"]))(q, q)


def test_what_print_shows() -> None:
    assert repr(RMSNorm(8, offset=1.0)) == "RMSNorm(8, eps=1e-06, offset=1)"
    assert repr(LayerNorm(8, bias=False)) == "LayerNorm(8, eps=1e-05, bias=False)"
    assert "positions=64, rotary_dim=16" in repr(RotaryEmbedding(RopeConfig(16, 64, ROPE["default"])))


@pytest.mark.parametrize("make", [lambda b: RMSNorm(8, backend=b), lambda b: SwiGLUMLP(8, 8, backend=b)])
def test_backend_is_strict(make: Callable[[str], nn.Module]) -> None:
    from tilewright.errors import TilewrightError

    x = torch.randn(2, 8)
    torch.testing.assert_close(make("torch")(x).shape, x.shape)
    with pytest.raises(TilewrightError, match="no_such_backend"):
        make("no_such_backend")(x)
