"""Which modules of each architecture are replaced, exactly, and that the model computes what it did.

Accuracy rule: err(patched, float64) <= 2 x err(unpatched, float64) + floor, the floor being float32's noise in a
float64 copy whose norms and rotations still run in float32.
"""

import copy

import pytest
import torch
from tests.models.zoo import MODELS, build, tokens
from torch import Tensor, nn

from tilewright.models import patch
from tilewright.models.moe.experts import run_plainly

REPLACED = {
    "llama": {"norm": 5, "mlp": 2, "rotary": 2, "add_norm": 2},
    "qwen2": {"norm": 5, "mlp": 2, "rotary": 2, "add_norm": 2},
    "qwen3": {"norm": 9, "mlp": 2, "rotary": 2, "add_norm": 2},  # and a norm of q and of k in each layer
    "mistral": {"norm": 5, "mlp": 2, "rotary": 2, "add_norm": 2},
    "gemma2": {"norm": 9, "mlp": 2, "rotary": 2},  # four norms a layer: the add is not next to one norm
    "gemma3": {"norm": 13, "mlp": 2, "rotary": 2},
    "phi3": {"norm": 5, "mlp": 2, "rotary": 2, "add_norm": 2},
    "deepseek_v2": {
        "norm": 9,
        "mlp": 2,
        "rotary": 2,
        "add_norm": 2,
        "experts": 1,
    },  # one dense MLP, one of shared experts
    "deepseek_v3": {"norm": 9, "mlp": 2, "rotary": 2, "add_norm": 2, "experts": 1, "routers": 1},
    "mixtral": {"norm": 5, "rotary": 2, "add_norm": 2, "experts": 2, "routers": 2},
    "gpt_oss": {"norm": 5, "rotary": 2, "experts": 2, "routers": 2},
    "glm": {"norm": 5, "mlp": 2, "rotary": 2, "add_norm": 2},
    "cohere": {"norm": 3, "mlp": 2, "rotary": 2},  # attention and MLP side by side on one norm
    "granite": {"norm": 5, "mlp": 2, "rotary": 2, "add_norm": 2},  # scales what it adds to the residual
}
LEFT = {
    "deepseek_v2": {"routers": 1, "attention": 1},  # groups by their best expert
    "gemma2": {"add_norm": 2, "attention": 1},
    "gemma3": {"add_norm": 2, "attention": 1},
    "gpt_oss": {"add_norm": 2, "attention": 1},
}
# One row of each form that must be recognised: (module, what its row says)
FORMS = {
    "llama": [
        ("mlp", "ops.swiglu, silu(gate_proj) * up_proj"),
        ("input_layernorm", "ops.rms_norm, cast then weight"),
        ("self_attn", "apply_rotary_pos_emb -> ops.apply_rope (half)"),
    ],
    "gemma2": [("input_layernorm", "ops.rms_norm, 1 + weight"), ("mlp", "ops.geglu, gelu_tanh(gate_proj) * up_proj")],
    "phi3": [("mlp", "ops.silu_and_mul, silu on the first half of gate_up_proj")],
    "qwen3": [("self_attn", "q_norm, k_norm, apply_rotary_pos_emb -> ops.qk_norm_rope (half)")],
    "gpt_oss": [
        ("input_layernorm", "ops.rms_norm, weight in float32"),
        ("self_attn", "apply_rotary_pos_emb -> ops.apply_rope (half_once)"),
    ],
    "glm": [("self_attn", "apply_rotary_pos_emb -> ops.apply_rope (interleaved)")],
    "cohere": [
        ("input_layernorm", "ops.layer_norm"),
        ("self_attn", "apply_rotary_pos_emb -> ops.apply_rope (repeated)"),
    ],
    "deepseek_v2": [("self_attn", "apply_rotary_emb -> ops.apply_rope (complex)")],
    "deepseek_v3": [
        (
            "self_attn",
            "apply_rotary_pos_emb_interleave -> ops.apply_rope (to_halves), "
            "apply_rotary_pos_emb -> ops.apply_rope (half)",
        )
    ],
}


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def relative_error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", MODELS)
def test_counts(name: str) -> None:
    report = patch(build(name), verify=False).report()
    assert report.counts() == REPLACED[name]
    assert report.counts("left") == LEFT.get(name, {"attention": 1})


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    rows = patch(build(name), verify=False).report().rows
    said = [(row.path, row.text) for row in rows]
    for module, text in FORMS[name]:
        verdict = "to rounding" if text == "ops.layer_norm" else "bitwise"  # Cohere sums its variance in another order
        assert [t for path, t in said if path == f"model.layers.0.{module}"] == [f"{text} ({verdict})"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_accuracy(name: str, dtype: torch.dtype) -> None:
    ids = tokens()
    model = build(name).to(dtype)
    exact_model = copy.deepcopy(model).double()
    run_plainly(exact_model)
    exact, unpatched = logits(exact_model, ids), logits(model, ids)
    patch(model, verify=False)
    assert relative_error(logits(model, ids), exact) <= 2 * relative_error(unpatched, exact) + 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_autocast(name: str) -> None:
    """float32 weights under bf16 autocast: linears give bf16, residuals and tables stay float32."""
    ids = tokens()
    model = build(name)
    exact_model = copy.deepcopy(model).double()
    run_plainly(exact_model)
    exact = logits(exact_model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        unpatched = logits(model, ids)
        patch(model, verify=False)
        patched = logits(model, ids)
    assert patched.dtype == unpatched.dtype
    assert relative_error(patched, exact) <= 2 * relative_error(unpatched, exact)


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_verify_by_default(name: str) -> None:
    result = patch(build(name).bfloat16()).verify(tokens())
    assert result.passed
    assert result.reference == "the unpatched model in float32"
    assert result.tokens == 48


def test_cached_decoding_matches() -> None:
    model = build("llama")
    ids = tokens(1, 8)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    patch(model, verify=False)
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), expected)


def test_allow_list_of_kinds_and_ops() -> None:
    assert patch(build("llama"), verify=False, ops=["norm"]).report().counts() == {"norm": 5}
    assert patch(build("llama"), verify=False, ops=["swiglu", "rotary"]).report().counts() == {"mlp": 2, "rotary": 2}
    left = [row.text for row in patch(build("llama"), verify=False, ops=["norm"]).report().rows if row.kind == "mlp"]
    assert left == ["ops.swiglu is not in ops="] * 2


def test_report_groups_layers_and_is_plain_data() -> None:
    report = patch(build("llama"), verify=False).report()
    assert "2 x norm" in str(report)
    assert "model.layers.*.input_layernorm (LlamaRMSNorm)" in str(report)
    fused = [row.path for row in report.rows if row.text.endswith("within its layer's ops.add_rms_norm")]
    assert fused == [f"model.layers.{i}.post_attention_layernorm" for i in range(2)]
    data = report.to_dict()
    assert data["replaced"] == REPLACED["llama"]
    assert data["rows"][0].keys() == {"path", "module_class", "kind", "status", "text"}


class Adapter(nn.Module):
    """A linear with a low-rank addition, as adapters and quantisers put in a linear's place."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_adapter_linears_keep_working() -> None:
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp.gate_proj = Adapter(layer.mlp.gate_proj)
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
    expected = logits(model, tokens())
    assert patch(model, verify=False).report().counts() == REPLACED["llama"]
    torch.testing.assert_close(logits(model, tokens()), expected)


def test_plain_modules_without_transformers() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.RMSNorm(16, eps=1e-5))
    p = patch(model, verify=False)
    assert p.report().counts() == {"norm": 2}
    x = torch.randn(4, 16)
    got = model(x)
    p.undo()
    torch.testing.assert_close(got, model(x))
