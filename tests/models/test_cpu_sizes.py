"""On a CPU a patched module runs our op where it was measured faster, and the model's own forward elsewhere."""

import pytest
import torch
from tests.assistant.planted import tiny_llama

from tilewright.dispatch import use_backend
from tilewright.models import patch
from tilewright.models.cpu_sizes import stays_with_torch


@pytest.mark.parametrize(
    ("op", "elements", "stays"),
    [
        ("rms_norm", 192, True),
        ("rms_norm", 1 << 16, False),
        ("apply_rope", 1 << 16, True),
        ("apply_rope", 1 << 17, False),
        ("swiglu", 1 << 12, True),
        ("layer_norm", 1 << 20, True),  # there is no CPU kernel
    ],
)
def test_small_calls_stay_with_torch(op, elements, stays):
    assert stays_with_torch(op, torch.empty(elements), None) == stays
    assert not stays_with_torch(op, torch.empty(elements), "cpu")  # who names a backend gets it
    assert not stays_with_torch(op, torch.empty(elements, device="meta"), None)


def test_a_preference_is_honoured():
    with use_backend("cpu"):
        assert not stays_with_torch("rms_norm", torch.empty(8), None)


def test_a_patched_models_short_prompt_is_bit_for_bit_the_models_own():
    ids = torch.randint(3, 200, (1, 12))
    model = tiny_llama()
    with torch.no_grad():
        expected = model(ids).logits
        patch(model)
        assert torch.equal(model(ids).logits, expected)
