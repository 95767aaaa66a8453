"""swiglu(gate, up) = silu(gate) * up, with the rounding of Llama's MLP."""

import pytest
import torch
from transformers.activations import ACT2FN

from tilewright.errors import InputError
from tilewright.ops.activation.silu_and_mul import silu_and_mul
from tilewright.ops.activation.swiglu import swiglu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_hugging_faces_formula_bit_for_bit(dtype):
    gate, up = torch.randn(2, 3, 17, 96).to(dtype)
    assert torch.equal(swiglu(gate, up), ACT2FN["silu"](gate) * up)


def test_silu_is_rounded_before_the_product():
    """One rounding at the end would be more accurate, and not what the model was trained with."""
    gate, up = torch.randn(2, 64, 96).bfloat16()
    once = (torch.nn.functional.silu(gate.float()) * up.float()).bfloat16()
    assert not torch.equal(swiglu(gate, up), once)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_and_split_are_one_function(dtype):
    x = torch.randn(5, 2, 64).to(dtype)
    assert torch.equal(silu_and_mul(x), swiglu(*x.chunk(2, -1)))


def test_gradients_are_those_of_the_formula():
    gate, up = torch.randn(2, 4, 8, dtype=torch.float64).unbind()
    assert torch.autograd.gradcheck(swiglu, (gate.requires_grad_(), up.requires_grad_()))


def test_a_gradient_that_is_not_needed_is_not_returned():
    gate, up = torch.randn(2, 4, 8).unbind()
    swiglu(gate.requires_grad_(), up).sum().backward()
    assert gate.grad is not None
    assert up.grad is None


def test_gate_and_up_of_different_shapes_are_refused():
    with pytest.raises(InputError, match=r"swiglu: up is \(4, 7\).*gate is \(4, 8\).*one shape and dtype"):
        swiglu(torch.ones(4, 8), torch.ones(4, 7))
