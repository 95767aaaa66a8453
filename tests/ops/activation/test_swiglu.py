"""swiglu(gate, up) = silu(gate) * up, with the rounding of Llama's MLP."""

import pytest
import torch
from transformers.activations import ACT2FN

from tilewright.errors import InputError
from tilewright.ops.activation.silu_and_mul import silu_and_mul
from tilewright.ops.activation.swiglu import swiglu

KERNEL = [
    pytest.param("cpu", marks=pytest.mark.interp, id="interpreted"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="cuda"),
]
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_falcon_h1s_multiplier(dtype):
    gate, up = torch.randn(2, 17, 96).to(dtype)
    wanted = up * ACT2FN["silu"](gate * 0.3)
    assert torch.equal(swiglu(gate, up, gate_multiplier=0.3), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_deepseek_v4s_clamp(dtype):
    gate, up = (4 * torch.randn(2, 17, 96)).to(dtype)
    wanted = ACT2FN["silu"](gate.clamp(max=3.1)) * up.clamp(min=-3.1, max=3.1)
    assert torch.equal(swiglu(gate, up, limit=3.1), wanted)


@pytest.mark.parametrize("options", [{"gate_multiplier": 0.3}, {"limit": 1.5}, {"gate_multiplier": -2.0, "limit": 1.5}])
@pytest.mark.parametrize("device", KERNEL)
def test_the_kernel_rounds_options_where_torch_does(device, options):
    """Exponentials differ by an ULP before equal roundings: nearly all bits are the same, gradients' too."""
    gate, up, dy = (2 * torch.randn(3, 9, 333, device=device)).bfloat16()
    inputs = (gate.requires_grad_(), up.requires_grad_())
    ours, theirs = (swiglu(*inputs, **options, backend=backend) for backend in ("triton", "torch"))
    ours, theirs = ((y, *torch.autograd.grad(y, inputs, dy)) for y in (ours, theirs))
    for a, b in zip(ours, theirs, strict=True):
        assert (a == b).float().mean() > 0.99


@pytest.mark.parametrize("device", KERNEL)
def test_an_infinite_gradient_beyond_the_limit_is_zero(device):
    gate, up = (torch.tensor([v], device=device, requires_grad=True) for v in (9.0, -9.0))
    y = swiglu(gate, up, limit=7.0, backend="triton")
    y.backward(torch.tensor([torch.inf], device=device))
    assert gate.grad.item() == up.grad.item() == 0.0


def test_gate_and_up_of_different_shapes_are_refused():
    with pytest.raises(InputError, match=r"swiglu: up is \(4, 7\).*gate is \(4, 8\).*one shape and dtype"):
        swiglu(torch.ones(4, 8), torch.ones(4, 7))
