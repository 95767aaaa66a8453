"""gelu_and_mul(x): gate and up side by side in the last dimension, the gate first."""

import pytest
import torch
from transformers.activations import ACT2FN

from tilewright.errors import InputError
from tilewright.ops.activation.gelu_and_mul import gelu_and_mul


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("approximate", "name"), [("tanh", "gelu_pytorch_tanh"), ("none", "gelu")])
def test_it_is_hugging_faces_formula_bit_for_bit(dtype, approximate, name):
    x = torch.randn(3, 17, 192).to(dtype)
    gate, up = x.chunk(2, dim=-1)
    assert torch.equal(gelu_and_mul(x, approximate=approximate), ACT2FN[name](gate) * up)


def test_the_gradient_is_packed_in_the_same_way():
    x = torch.tensor([0.0, 7.0], requires_grad=True)
    gelu_and_mul(x).backward()
    assert x.grad.tolist() == [3.5, 0.0]  # gelu'(0) * up, gelu(0)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_gradients_are_those_of_the_formula(approximate):
    x = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: gelu_and_mul(t, approximate=approximate), (x,))


def test_tanh_is_the_default_and_differs_from_erf():
    x = torch.randn(64, 128)
    assert torch.equal(gelu_and_mul(x), gelu_and_mul(x, approximate="tanh"))
    assert not torch.equal(gelu_and_mul(x), gelu_and_mul(x, approximate="none"))


def test_gelu_is_rounded_before_the_product():
    """One rounding at the end would be more accurate, and not what the model was trained with."""
    x = torch.randn(64, 192).bfloat16()
    gate, up = x.float().chunk(2, dim=-1)
    assert not torch.equal(gelu_and_mul(x), (ACT2FN["gelu_pytorch_tanh"](gate) * up).bfloat16())


def test_another_approximation_and_an_odd_width_are_refused():
    with pytest.raises(InputError, match="approximate is 'fast'; allowed are 'tanh' and 'none'"):
        gelu_and_mul(torch.ones(2, 4), approximate="fast")
    with pytest.raises(InputError, match=r"x is \(2, 5\); needs an even last dimension"):
        gelu_and_mul(torch.ones(2, 5))
