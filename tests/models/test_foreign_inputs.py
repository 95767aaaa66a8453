"""`patch` of models that take something else than tokens: their inputs are used, or asked for in one line."""

import pytest
import torch
from torch import Tensor, nn

from tilewright import patch
from tilewright.errors import InputError
from tilewright.models.moe.experts import holds_experts


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, input_features: Tensor) -> Tensor:
        if input_features.shape[-1] != 16:
            raise ValueError("expected 16 features\nand more")
        return self.norm(input_features)


def test_a_model_without_tokens_asks_for_its_inputs() -> None:
    with pytest.raises(InputError, match=r"takes no input_ids.*input_features.*Pass inputs="):
        patch(Speech().eval())


def test_a_tensor_is_the_first_thing_a_model_takes() -> None:
    x = torch.randn(2, 3, 16)
    for model in (Speech().eval(), nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4)).eval()):
        expected = model(x)
        with patch(model, inputs=x) as patched:
            assert patched.report().counts() == {"norm": 1}
            torch.testing.assert_close(model(x), expected)


def test_a_model_that_fails_on_its_inputs_is_not_blamed_on_the_patch() -> None:
    model = Speech().eval()
    with pytest.raises(InputError, match=r"Speech, unpatched, fails on inputs=: ValueError: expected 16 features Pass"):
        patch(model, inputs=torch.randn(2, 3, 8))
    assert type(model.norm) is nn.LayerNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_t5_is_an_rms_norm(dtype: torch.dtype) -> None:
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    norm = T5LayerNorm(16).to(dtype)
    nn.init.normal_(norm.weight)
    model = nn.Sequential(norm).eval()
    xs = [torch.randn(3, 16).to(other) for other in (torch.float32, torch.bfloat16)]
    expected = [model(x) for x in xs]
    with patch(model, verify=False) as patched:
        assert patched.report().counts() == {"norm": 1}
        assert "rms_norm" in str(patched.report())
        for x, y in zip(xs, expected, strict=True):
            assert torch.equal(model(x), y)


def test_embeddings_of_positions_are_no_experts() -> None:
    class Embeddings(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.cls_token = nn.Parameter(torch.randn(count, 1, 8))
            self.position_embeddings = nn.Parameter(torch.randn(count, 5, 8))

    assert not holds_experts(Embeddings(1))
    assert holds_experts(Embeddings(4))
