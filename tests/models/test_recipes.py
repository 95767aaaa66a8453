"""Blocks of further architectures: squared ReLU, multipliers, gated norms, norms without a weight, M-RoPE."""

from typing import Any

import pytest
import torch
from tests.models.zoo import build_as, tokens
from torch import Tensor, nn

from tilewright.models import patch

KINDS = ["norm", "mlp", "rotary", "add_norm", "loss"]
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {  # options, what is replaced, one row of the report
    "Nemotron": ({}, {"norm": 5, "mlp": 2, "rotary": 2}, "ops.layer_norm, 1 + weight (bitwise)"),
    "Arcee": (
        {"head_dim": 8},
        {"norm": 5, "mlp": 2, "rotary": 2, "add_norm": 2},
        "ops.relu2, relu(up_proj)^2 (bitwise)",
    ),
    "FalconH1": (
        {
            **MAMBA,
            "mamba_d_ssm": 64,
            "mamba_rms_norm": True,
            "mlp_multipliers": [0.9, 0.6],
            "lm_head_multiplier": 0.4,
        },
        {"norm": 7, "mlp": 2, "rotary": 2},
        "ops.swiglu, silu(gate_proj * gate_multiplier) * up_proj, times down_multiplier (bitwise)",
    ),
    "Granite": (
        {"residual_multiplier": 0.5, "logits_scaling": 3.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.3},
        {"norm": 5, "mlp": 2, "rotary": 2, "add_norm": 2},
        "ops.add_rms_norm: the add after self_attn * residual_multiplier with post_attention_layernorm (bitwise)",
    ),
    "Bamba": (
        {**MAMBA, "attn_layer_indices": [0]},
        {"norm": 6, "mlp": 2, "rotary": 1},
        "ops.rms_norm_gated, norm of x times silu(gate), means of 64 (bitwise)",
    ),
    "NanoChat": ({"head_dim": 8}, {"norm": 9, "mlp": 2, "add_norm": 2}, "ops.rms_norm, without a weight (bitwise)"),
}


def loss_and_gradients(model: nn.Module, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("prefix", MODELS)
def test_models(prefix: str) -> None:
    options, replaced, text = MODELS[prefix]
    model, ids = build_as(prefix, options), tokens(2, 12)
    expected, gradients = logits(model, ids), loss_and_gradients(model, ids)
    p = patch(model, mode="train", verify=False, ops=KINDS, backend="torch")
    assert p.report().counts() == {**replaced, "loss": 2}
    assert text in {row.text for row in p.report().rows}
    torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=0)
    for ours, theirs in zip(loss_and_gradients(model, ids), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    p.undo()
    assert all(torch.equal(a, b) for a, b in zip(loss_and_gradients(model, ids), gradients, strict=True))


@pytest.mark.parametrize(("kind", "style"), [("Qwen2_5_VL", "half"), ("Glm4v", "repeated")])
def test_images_and_text(kind: str, style: str) -> None:
    """M-RoPE in the text, the rotation of packed patches in the tower."""
    import transformers
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

    if hasattr(modeling_qwen2_5_vl, "apply_multimodal_rotary_pos_emb"):
        pytest.skip("this release wraps attention, and sorts M-RoPE's axes in every layer: patch leaves both")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": 128, "num_hidden_layers": 1, "num_key_value_heads": 2, "rope_parameters": rope}
    tower = {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "depth": 1}
    config = getattr(transformers, f"{kind}Config")(text_config={**text, "pad_token_id": 0}, vision_config=tower)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    visual, grid = model.model.visual, torch.tensor([[1, 4, 6], [1, 2, 4]])
    pixels = torch.randn(int(grid.prod(1).sum()), visual.patch_embed.proj.weight[0].numel())
    ids, positions = tokens(2, 12), torch.randint(0, 50, (3, 2, 12))

    def results() -> list[Tensor]:
        with torch.no_grad():
            text_logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            return [text_logits, visual(pixels, grid_thw=grid).last_hidden_state]

    expected = results()
    p = patch(model, verify=False, ops=["rotary"], backend="torch")
    said = sorted(row.text.partition("-> ")[2] for row in p.report().rows if row.status == "replaced")
    assert said == sorted([f"ops.apply_rope ({style}) (bitwise)", "ops.apply_rope (packed) (bitwise)"])
    for ours, theirs in zip(results(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
