"""`verify` must pass what is as accurate as before, and catch what is not."""

import math
from typing import Any

import pytest
import torch
from tests.models.zoo import build, tokens
from torch import Tensor, nn

from tilewright import ops
from tilewright.errors import InputError, VerificationError
from tilewright.models import Agreement, Comparison, patch
from tilewright.models.specialise import Patched


def test_wilson_interval_against_published_values() -> None:
    """Newcombe 1998, table I: 81 of 263 gives 0.2553 to 0.3662; 0 of 20 gives 0 to 0.1611."""
    low, high = Agreement(81, 263).interval
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    low, high = Agreement(0, 20).interval
    assert (round(low, 4), round(high, 4)) == (0.0, 0.1611)


def test_the_change_between_two_samples() -> None:
    """Newcombe 1998 (interval estimation for the difference), table II: 56 of 70 less 48 of 80: 0.0524 to 0.3339."""
    assert Agreement(56, 70).change_from(Agreement(48, 80)) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_comparison_rule() -> None:
    assert Comparison(1.09e-2, 1e-2, 1.1).passed
    assert not Comparison(1.11e-2, 1e-2, 1.1).passed
    assert not Comparison(math.nan, 1e-2, 1.1).passed
    assert Comparison(0.0, 0.0, 1.1).ratio == 1.0
    assert math.isinf(Comparison(1e-3, 0.0, 1.1).ratio)


@pytest.mark.parametrize(("dtype", "wide"), [(torch.float32, "float64"), (torch.bfloat16, "float32")])
def test_result_names_its_reference(dtype: torch.dtype, wide: str) -> None:
    result = patch(build("llama").to(dtype), verify=False).verify()
    assert result.reference == f"the unpatched model in {wide}"
    assert result.tokens == 256
    assert 0 < result.logits.unpatched_error < 0.1
    assert result.gradients is None
    assert "top-1 agreement" in str(result)


def coarser(function: Any, factor: float) -> Any:
    """An op whose result is off by a relative `factor`, alternating in sign."""

    def wrong(*args: Any, **kwargs: Any) -> Tensor:
        y = function(*args, **kwargs)
        return y if kwargs.get("backend") == "torch" else y * (1 + factor)

    return wrong


@pytest.mark.parametrize("factor", [math.nan, 0.1])
def test_a_wrong_kernel_is_caught_and_the_model_given_back(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe asks the torch backend, so a wrong kernel passes it; verification runs what the model will run."""
    monkeypatch.setattr(ops, "swiglu", coarser(ops.swiglu, factor))
    model = build("llama").bfloat16()
    with pytest.raises(VerificationError, match="lost accuracy"):
        patch(model, inputs=tokens())
    assert not any(isinstance(m, Patched) for m in model.modules())


def test_verification_leaves_the_model_as_it_was() -> None:
    model = build("llama")
    model.train()
    model.model.norm.eval()
    p = patch(model, mode="train", inputs=tokens())
    assert model.training
    assert not model.model.norm.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert isinstance(model.model.norm, Patched)
    p.undo()


def test_only_unmasked_positions_count() -> None:
    p = patch(build("llama"), verify=False)
    ids = tokens(2, 10)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    assert p.verify({"input_ids": ids, "attention_mask": mask}).tokens == 16


def test_model_without_a_vocabulary_needs_inputs() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    with pytest.raises(InputError, match=r"takes no input_ids.* Pass inputs="):
        patch(model)
    assert not any(isinstance(m, Patched) for m in model.modules())
    with pytest.raises(InputError, match="inputs is a list"):
        patch(model, inputs=[1, 2])  # type: ignore[arg-type]


def test_base_model_is_verified_on_hidden_states() -> None:
    base = build("llama").model
    assert patch(base, inputs=tokens()).verify(tokens()).passed
