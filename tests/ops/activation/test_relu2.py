"""relu2(x) = relu(x)^2, alone as in Nemotron and as a gate as in BitNet."""

import pytest
import torch
from transformers.activations import ACT2FN

from tilewright.errors import InputError
from tilewright.ops.activation.relu2 import relu2

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPECIAL = [torch.inf, -torch.inf, torch.nan, 300.0, -300.0, 1e-30, 0.0, -0.0]
PLACES = [
    pytest.param("torch", "cpu", id="torch"),
    pytest.param("triton", "cpu", marks=pytest.mark.interp, id="interpreted"),
    pytest.param("triton", "cuda", marks=pytest.mark.gpu, id="cuda"),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_hugging_faces_formula_bit_for_bit(dtype):
    x, up = torch.randn(2, 3, 17, 96).to(dtype)
    assert torch.equal(relu2(x), ACT2FN["relu2"](x))
    assert torch.equal(relu2(x, up), ACT2FN["relu2"](x) * up)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_special_values_and_their_gradients_are_torchs(backend, device, gated):
    """An infinite gradient of what is not above zero is zero, not NaN."""
    x = torch.tensor(SPECIAL, device=device).repeat(2).requires_grad_()
    up = torch.full_like(x, 0.5).requires_grad_() if gated else None
    dy = torch.cat((torch.ones(8), torch.full((8,), torch.inf))).to(device)
    inputs = [x] if up is None else [x, up]
    wanted = torch.square(torch.relu(x)) if up is None else torch.square(torch.relu(x)) * up
    y = relu2(x, up, backend=backend)
    torch.testing.assert_close(y, wanted, rtol=0, atol=0, equal_nan=True)
    ours, theirs = (torch.autograd.grad(t, inputs, dy) for t in (y, wanted))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_gradients_are_those_of_the_formula():
    x, up = torch.randn(2, 4, 8, dtype=torch.float64).unbind()
    inputs = (x.requires_grad_(), up.requires_grad_())
    assert torch.autograd.gradcheck(relu2, inputs)
    assert torch.autograd.gradgradcheck(relu2, inputs)


@pytest.mark.parametrize(("backend", "device"), PLACES[1:])
def test_the_kernel_rounds_where_the_models_do(backend, device):
    x, up = (torch.randn(7, 333, device=device).bfloat16() for _ in range(2))
    assert torch.equal(relu2(x, backend=backend), torch.square(torch.relu(x)))
    assert torch.equal(relu2(x.mT, up.mT, backend=backend), torch.square(torch.relu(x.mT)) * up.mT)


def test_up_of_another_dtype_is_refused():
    with pytest.raises(InputError, match=r"relu2: up is \(4, 8\) torch.bfloat16, x is \(4, 8\) torch.float32"):
        relu2(torch.ones(4, 8), torch.ones(4, 8).bfloat16())
