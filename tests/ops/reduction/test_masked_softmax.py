"""masked_softmax(x, mask, causal, temperature): torch's softmax of visible keys; 0 where there are none."""

import pytest
import torch

from tilewright.errors import InputError
from tilewright.ops.reduction.masked_softmax import MaskedSoftmaxArgs, MaskedSoftmaxBackwardArgs, masked_softmax

DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]


def test_it_is_torchs_softmax_of_masked_scores():
    x, bias = torch.randn(2, 3, 5, 9), torch.randn(3, 1, 9)
    keep = torch.rand(2, 1, 5, 9) < 0.8
    keep[..., 0] = True
    torch.testing.assert_close(masked_softmax(x), torch.softmax(x, -1))
    torch.testing.assert_close(masked_softmax(x, temperature=0.5), torch.softmax(x / 0.5, -1))
    torch.testing.assert_close(masked_softmax(x, bias, temperature=2.0), torch.softmax(x / 2 + bias, -1))
    torch.testing.assert_close(masked_softmax(x, keep), torch.softmax(x.masked_fill(~keep, -torch.inf), -1))
    visible = torch.arange(9) <= torch.arange(5)[:, None] + 4
    torch.testing.assert_close(masked_softmax(x, causal=True), torch.softmax(x.masked_fill(~visible, -torch.inf), -1))


def test_it_is_the_attention_of_torch():
    q, k = torch.randn(2, 3, 6, 8), torch.randn(2, 3, 6, 8)
    v = torch.eye(6).expand(2, 3, 6, 6)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(masked_softmax(q @ k.mT, causal=True, temperature=8**0.5), expected)


@pytest.mark.parametrize("additive", [False, True])
def test_a_row_without_keys_is_zero_and_so_is_its_gradient(additive):
    x = torch.randn(4, 6, requires_grad=True)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[1] = False
    given = torch.where(mask, 0.0, -torch.inf) if additive else mask
    y = masked_softmax(x, given)
    (dx,) = torch.autograd.grad((y * torch.randn(4, 6)).sum(), x)
    for value in (y.detach(), dx):
        assert torch.equal(value[1], torch.zeros(6))
        assert value.isfinite().all()
        assert (value[[0, 2, 3]] != 0).all()


def test_the_gradient_is_that_of_the_formula():
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(3, 5) < 0.7
    function = lambda t: masked_softmax(t, mask, causal=True, temperature=0.7)  # noqa: E731 - one call, twice
    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


def test_a_learned_mask_is_refused():
    with pytest.raises(InputError, match="mask requires a gradient and gets none. Add it to x"):
        masked_softmax(torch.ones(2, 3), torch.zeros(2, 3, requires_grad=True))


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy, in the interpreter's maximum
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("device", DEVICES)
def test_one_tile_and_several(device, dtype):
    from tilewright.ops.reduction.kernels.triton import masked_softmax as kernels

    x = (torch.randn(2, 2, 5, 300, device=device) * 3).to(dtype)
    keep = torch.rand(2, 1, 5, 300, device=device) < 0.5
    keep[1, :, 2] = False
    bias = torch.randn(2, 1, 300, device=device)
    bias[..., :260] = -torch.inf
    x[0, 0, 0, 299] = torch.nan
    x[0, 1, 4, 298] = torch.inf
    keep[0, :, 0, 299] = False  # a hidden NaN
    limit = 2.0**-7 if dtype is torch.bfloat16 else 1e-5
    for mask, causal, temperature in ((None, True, 1.0), (keep, True, 0.5), (bias, False, 2.0), (keep, False, 1.0)):
        args = MaskedSoftmaxArgs(x, mask, causal, temperature)
        expected = masked_softmax(x.double(), mask, causal=causal, temperature=temperature)
        y = expected.nan_to_num().to(dtype)
        dy = torch.randn_like(y)
        total = y.double().sum(-1, keepdim=True)
        mean = (y.double() * dy.double()).sum(-1, keepdim=True) / torch.where(total == 0, 1, total)
        wanted = y.double() * (dy.double() - mean) / temperature
        for config in (kernels.Config(512, 1), kernels.Config(128, 1)):
            out, dx = torch.full_like(x, 7.0), torch.full_like(x, 7.0)
            kernels.launch((out,), args, config)
            torch.testing.assert_close(out.double(), expected, rtol=limit, atol=1e-6, equal_nan=True)
            kernels.launch_backward((dx,), MaskedSoftmaxBackwardArgs(dy, y, temperature), config)
            torch.testing.assert_close(dx.double(), wanted, rtol=limit, atol=1e-6)
            kernels.launch_backward((dx,), MaskedSoftmaxBackwardArgs(torch.ones_like(y), y, temperature), config)
            torch.testing.assert_close(dx, torch.zeros_like(dx), rtol=0, atol=1e-6)
