"""geglu(gate, up) = gelu(gate) * up, by tanh as in Gemma or by the error function."""

import pytest
import torch
from transformers.activations import ACT2FN

from tilewright.errors import InputError
from tilewright.ops.activation.geglu import geglu
from tilewright.ops.activation.gelu_and_mul import gelu_and_mul

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAMES = {"tanh": "gelu_pytorch_tanh", "none": "gelu"}


@pytest.mark.parametrize("approximate", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_hugging_faces_formula_bit_for_bit(dtype, approximate):
    gate, up = torch.randn(2, 3, 17, 96).to(dtype)
    assert torch.equal(geglu(gate, up, approximate=approximate), ACT2FN[NAMES[approximate]](gate) * up)


@pytest.mark.parametrize("approximate", NAMES)
def test_packed_and_split_are_one_function(approximate):
    x = torch.randn(5, 2, 64).bfloat16()
    assert torch.equal(gelu_and_mul(x, approximate=approximate), geglu(*x.chunk(2, -1), approximate=approximate))


def test_tanh_is_the_default_and_differs_from_erf():
    gate, up = torch.randn(2, 64, 64).unbind()
    assert torch.equal(geglu(gate, up), geglu(gate, up, approximate="tanh"))
    assert not torch.equal(geglu(gate, up), geglu(gate, up, approximate="none"))


@pytest.mark.parametrize("approximate", NAMES)
def test_gradients_are_those_of_the_formula(approximate):
    gate, up = torch.randn(2, 4, 8, dtype=torch.float64).unbind()
    inputs = (gate.requires_grad_(), up.requires_grad_())
    assert torch.autograd.gradcheck(lambda g, u: geglu(g, u, approximate=approximate), inputs)


def test_another_approximation_is_refused_by_name():
    with pytest.raises(InputError, match="approximate is 'sigmoid'; allowed are 'tanh' and 'none'"):
        geglu(torch.ones(4), torch.ones(4), approximate="sigmoid")
