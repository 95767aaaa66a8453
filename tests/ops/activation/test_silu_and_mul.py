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


def test_silu_is_rounded_before_the_product():
    """One rounding at the end would be more accurate, and not what the model was trained with."""
    x = torch.randn(64, 192).bfloat16()
    gate, up = x.float().chunk(2, dim=-1)
    assert not torch.equal(silu_and_mul(x), (ACT2FN["silu"](gate) * up).bfloat16())


def test_gradients_are_those_of_the_formula():
    x = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(silu_and_mul, (x,))


def test_an_odd_width_is_refused_with_its_shape():
    with pytest.raises(InputError, match=r"x is \(2, 5\); needs an even last dimension"):
        silu_and_mul(torch.ones(2, 5))
