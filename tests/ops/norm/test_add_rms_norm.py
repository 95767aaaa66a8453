"""add_rms_norm: an addition and rms_norm, with the bits of the two; one gradient for both summands."""

import pytest
import torch

from tilewright import ops
from tilewright.errors import InputError

DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPTIONS = [{}, {"fp32_weight": True}, {"offset": 1.0, "eps": 1e-5}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_an_addition_and_rms_norm_bit_for_bit(dtype, options):
    x, residual, weight = torch.randn(3, 5, 333).to(dtype), torch.randn(3, 5, 333).to(dtype), torch.randn(333).to(dtype)
    before = x.clone(), residual.clone()
    y, total = ops.add_rms_norm(x, residual, weight, **options, backend="torch")
    assert torch.equal(total, x + residual)
    assert torch.equal(y, ops.rms_norm(x + residual, weight, **options, backend="torch"))
    assert torch.equal(x, before[0]), "x is read only"
    assert torch.equal(residual, before[1]), "so is the residual"


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_the_sum_is_rounded_before_it_is_normalised(backend):
    """1 + 2^-9 is 1 in bfloat16: half of the row differs by 1e-3 from the other half unless it is rounded."""
    x = torch.ones(2, 64).bfloat16()
    residual = torch.zeros(2, 64).bfloat16()
    residual[:, ::2] = 2.0**-9
    y, total = ops.add_rms_norm(x, residual, torch.ones(64), fp32_weight=False, eps=0.0, backend=backend)
    assert torch.equal(total, x)
    assert torch.equal(y, torch.ones(2, 64))


def gradients(backend, used, device="cpu", dtype=torch.float64):
    """Gradients of x, residual and weight where only some of the results are used."""
    rng = torch.Generator().manual_seed(0)
    x, residual, dy, dtotal = (torch.randn(6, 96, generator=rng).to(device, dtype) for _ in range(4))
    weight = torch.randn(96, generator=rng).to(device, dtype)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]
    results = ops.add_rms_norm(*leaves, eps=1e-3, backend=backend)
    outputs, cotangents = [results[i] for i in used], [(dy, dtotal)[i] for i in used]
    grads = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
    return (x + residual).detach(), weight.detach(), dy, dtotal, grads


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["the norm", "the sum", "both"])
def test_the_gradient_is_that_of_the_formula(used):
    total, weight, dy, dtotal, (dx, dresidual, dweight) = gradients("torch", used)
    dy, dtotal = dy * (0 in used), dtotal * (1 in used)
    rstd = (total.pow(2).mean(-1, keepdim=True) + 1e-3).rsqrt()
    x_hat, wdy = total * rstd, weight * dy
    wanted = rstd * (wdy - x_hat * (wdy * x_hat).mean(-1, keepdim=True)) + dtotal
    torch.testing.assert_close(dx, wanted)
    assert torch.equal(dx, dresidual)
    torch.testing.assert_close(torch.zeros_like(weight) if dweight is None else dweight, (dy * x_hat).sum(0))


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["the norm", "the sum", "both"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_takes_gradients_of_either_result(device, used):
    *_, ours = gradients("triton", used, device, torch.float32)
    *_, wanted = gradients("torch", used, device, torch.float32)
    for grad, expected in zip(ours, wanted, strict=True):
        expected = torch.zeros_like(grad) if expected is None else expected
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


def test_errors_say_what_was_given_and_what_is_allowed():
    x, weight = torch.ones(4, 8), torch.ones(8)
    match = r"add_rms_norm: residual is \(1, 8\) torch\.float32, x is \(4, 8\) torch\.float32; they must have one shape"
    with pytest.raises(InputError, match=match):
        ops.add_rms_norm(x, torch.ones(1, 8), weight)
    with pytest.raises(InputError, match=r"add_rms_norm: residual is \(4, 8\) torch\.bfloat16, x is"):
        ops.add_rms_norm(x, x.bfloat16(), weight)
    with pytest.raises(InputError, match=r"add_rms_norm: weight is \(9,\); needs \(8,\)"):
        ops.add_rms_norm(x, x.clone(), torch.ones(9))
