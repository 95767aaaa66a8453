"""silu_and_mul(x): gate and up side by side in the last dimension, the gate first."""

import pytest
import torch
from transformers.activations import ACT2FN

from tilewright.errors import InputError
from tilewright.ops.activation.silu_and_mul import silu_and_mul


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_is_phi3s_mlp_bit_for_bit(dtype):
    x = torch.randn(3, 17, 192).to(dtype)
    gate, up = x.chunk(2, dim=-1)
    assert torch.equal(silu_and_mul(x), up * ACT2FN["silu"](gate))


def test_the_gate_comes_first():
    assert silu_and_mul(torch.tensor([0.0, 5.0])).item() == 0.0
    assert silu_and_mul(torch.tensor([5.0, 0.0])).item() == 0.0
    assert silu_and_mul(torch.tensor([20.0, 3.0])).item() == pytest.approx(60.0)
    assert silu_and_mul(torch.tensor([3.0, 20.0])).item() == pytest.approx(57.15, abs=0.01)


def test_the_gradient_is_packed_in_the_same_way():
    x = torch.tensor([0.0, 7.0], requires_grad=True)
    silu_and_mul(x).backward()
    assert x.grad.tolist() == [3.5, 0.0]  # silu'(0) * up, silu(0)


def test_an_odd_width_is_refused_with_its_shape():
    with pytest.raises(InputError, match=r"x is \(2, 5\); needs an even last dimension"):
        silu_and_mul(torch.ones(2, 5))
