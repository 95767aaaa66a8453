"""Linear layers of fewer bits in `optimize`: what is exchanged, when it is tried, and that perplexity judges it."""

import math
from types import SimpleNamespace

import pytest
import torch
from tests.models.zoo import build, tokens

from tilewright.assistant.changes import chosen
from tilewright.assistant.reference import Evaluation
from tilewright.assistant.verify import judge
from tilewright.models.patching import patch
from tilewright.nn import WeightOnlyLinear

WIDE = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def evaluation(rise=0.0, shift=0.0):
    """Logits `shift` away from others, and a perplexity `rise` above 20."""
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    nll = torch.full((200,), math.log(20) + math.log1p(rise), dtype=torch.float64)
    return Evaluation(logits + shift * torch.randn(64, 50), nll, 0, 0)


@pytest.mark.parametrize(("rise", "passes"), [(-0.01, True), (0.029, True), (0.031, False), (math.nan, False)])
def test_perplexity_alone_judges_fewer_bits(rise, passes):
    own = evaluation()
    accuracy = judge(evaluation(rise, shift=0.2), own, own, 0.03)
    assert accuracy.passed == passes
    assert not judge(evaluation(0.0, shift=0.2), own, own).passed, "rounding has to be smaller"


def test_without_prompts_or_with_a_nan_it_fails():
    own = evaluation()
    assert judge(own._replace(nll=None) if hasattr(own, "_replace") else _without(own), own, own, 0.03).failures
    assert "not finite" in judge(evaluation(shift=math.inf), own, own, 0.03).failures[0]


def _without(own):
    return Evaluation(own.logits, None, own.generated, own.agreed)


def test_a_patched_model_is_quantised_and_restored():
    (change,) = chosen(["int4_linears"])
    model = build("llama", **WIDE)
    with torch.no_grad(), patch(model, verify=False):
        before = model(input_ids=tokens(1, 8)).logits
        scene = SimpleNamespace(model=model, work=SimpleNamespace(held_out=False))
        assert not change.applies(scene).ok
        scene.work.held_out = True
        assert change.applies(scene).reason == "14 linear layers can have weights in int4."
        linear = model.model.layers[0].mlp.up_proj
        applied = change.apply(model, None)
        assert applied.detail == "14 linear layers have weights in int4"
        assert isinstance(model.model.layers[0].mlp.up_proj, WeightOnlyLinear)
        assert 1e-3 < (model(input_ids=tokens(1, 8)).logits - before).norm() / before.norm() < 0.3
        applied.undo()
        assert model.model.layers[0].mlp.up_proj is linear
        assert torch.equal(model(input_ids=tokens(1, 8)).logits, before)
