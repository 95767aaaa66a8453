"""Norms of queries and keys run inside the rotation where a layer's own code allows it, and nowhere else."""

from typing import Any

import pytest
import torch
from tests.models.zoo import build, build_as, tokens
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, apply_rotary_pos_emb

from tilewright.dispatch import record
from tilewright.models import patch
from tilewright.models.report import Report

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
FUSED: dict[str, dict[str, Any]] = {
    "Qwen3Moe": EXPERTS,
    "Glm4Moe": {"use_qk_norm": True, "first_k_dense_replace": 2, "head_dim": 8},  # half of a head rotates
    "Apertus": {"head_dim": 8},
}
APART: dict[str, dict[str, Any]] = {
    "Olmo2": {},  # a norm of all heads at once
    "HunYuanDenseV1": {"head_dim": 8},  # norms after the rotation
}


def said(report: Report, name: str = "self_attn") -> list[str]:
    return [row.text for row in report.rows if row.path.endswith(name) and row.status == "replaced"]


def fused(report: Report) -> list[bool]:
    return ["ops.qk_norm_rope" in text for text in said(report)]


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("prefix", [*FUSED, *APART])
def test_models(prefix: str) -> None:
    model, ids = build_as(prefix, {**FUSED, **APART}[prefix]), tokens()
    expected = logits(model, ids)
    p = patch(model, verify=False, ops=["rotary"], backend="torch")
    assert fused(p.report()) == [prefix in FUSED] * 2
    torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=0)


def test_a_layer_that_does_not_rotate_keeps_its_norms() -> None:
    """Exaone 4: norms in each layer, rotation in those with a window."""
    model, ids = build_as("Exaone4", {"sliding_window": 8, "sliding_window_pattern": 2}), tokens()
    expected = logits(model, ids)
    p = patch(model, verify=False, backend="torch", ops=["norm", "rotary"])
    assert fused(p.report()) == [True, False]
    within = [text.endswith("within its attention's ops.qk_norm_rope") for text in said(p.report(), "q_norm")]
    assert within == [True, False]
    torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=0)


@pytest.mark.parametrize("why", ["ops", "a hook", "another eps", "weights of two sizes"])
def test_rotation_alone_is_replaced(why: str) -> None:
    model = build("qwen3")
    for layer in model.model.layers:
        if why == "a hook":
            layer.self_attn.k_norm.register_forward_hook(lambda *_: None)
        if why == "another eps":
            layer.self_attn.k_norm.variance_epsilon = 0.5
        if why == "weights of two sizes":
            layer.self_attn.k_norm.weight = nn.Parameter(torch.ones(1))
    expected = logits(model, tokens())
    p = patch(model, verify=False, backend="torch", ops=["apply_rope"] if why == "ops" else ["rotary"])
    assert said(p.report()) == ["apply_rotary_pos_emb -> ops.apply_rope (half) (bitwise)"] * 2
    torch.testing.assert_close(logits(model, tokens()), expected, rtol=0, atol=0)


class HandsOnTables(Qwen3Attention):
    """Attention that hands cos and sin to its cache, as earlier releases of transformers do."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, past_key_values: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if past_key_values is not None:
            k, _ = past_key_values.update(k, k, 0, {"cos": cos, "sin": sin})
        return q @ k.repeat_interleave(2, 1).mT, None


def test_a_cache_that_takes_the_tables_keeps_the_norms() -> None:
    model = build("qwen3")
    model.model.layers[0].self_attn.__class__ = HandsOnTables
    assert fused(patch(model, verify=False, ops=["rotary"]).report()) == [False, True]


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_training_step_runs_it_both_ways(name: str) -> None:
    ids, gradients = tokens(), []
    for patched in (False, True):
        model = build(name).train()
        if patched:
            patch(model, mode="train", verify=False, backend="torch", ops=["rotary"])
        with record() as recording:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert {plan.op for plan in recording.plans} == {"qk_norm_rope"}
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_it_compiles_and_decodes() -> None:
    torch._dynamo.reset()
    model, ids = build("qwen3", num_hidden_layers=1), tokens(1, 8)
    expected, text = logits(model, ids), model.generate(ids, max_new_tokens=6, do_sample=False)
    patch(model, verify=False, backend="torch", ops=["rotary"])
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), text)
    model.model.layers[0].self_attn.compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(logits(model, ids), expected)
