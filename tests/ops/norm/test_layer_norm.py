"""layer_norm: torch's own, bit for bit, and the formula; constant rows, and rows far from zero.

An ULP of the mean of a row of 255 is 1.5e-5, and 1 / std of a constant row is 316: off by that ULP, LayerNorm gives
5e-3 in place of 0.
"""

import pytest
import torch
import torch.nn.functional as F

from tilewright import ops
from tilewright.errors import InputError

WIDTHS = (333, 512, 4096, 20000)  # a masked tail; whole; wide; longer than registers
VALUES = (255.0, 255.1, -9999.7, 0.1)
DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
AFFINE = {"both": (True, True), "weight": (True, False), "bias": (False, True), "none": (False, False)}


def problem(dtype, affine):
    """x, weight or None, bias or None."""
    x, *vectors = torch.randn(3, 7, 333).to(dtype), torch.randn(333).to(dtype), torch.randn(333).to(dtype)
    return x, *(v if present else None for v, present in zip(vectors, AFFINE[affine], strict=True))


@pytest.mark.parametrize("affine", AFFINE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_module_of_torch_bit_for_bit(dtype, affine):
    x, weight, bias = problem(dtype, affine)
    module = torch.nn.LayerNorm(333, eps=1e-3, elementwise_affine=weight is not None, bias=bias is not None)
    if weight is not None:
        module = module.to(dtype)
        module.weight.data = weight
    elif bias is not None:  # torch has no such module
        module = lambda x: F.layer_norm(x, (333,), None, bias, 1e-3)  # noqa: E731
    if weight is not None and bias is not None:
        module.bias.data = bias
    assert torch.equal(ops.layer_norm(x, weight, bias, eps=1e-3), module(x))


@pytest.mark.parametrize("affine", AFFINE)
def test_it_is_the_formula_rounded_once(affine):
    x, weight, bias = problem(torch.bfloat16, affine)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    wanted = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    wanted = wanted * (1 if weight is None else weight) + (0 if bias is None else bias)
    y = ops.layer_norm(x, weight, bias)
    assert y.dtype == torch.bfloat16
    assert (y.double() - wanted).abs().max() <= 2.0**-8 * wanted.abs().max()


def test_the_gradient_is_that_of_the_formula():
    x, weight, dy = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 96), (96,), (5, 96)))
    leaves = [t.requires_grad_() for t in (x, weight, torch.zeros(96, dtype=torch.float64))]
    found = torch.autograd.grad(ops.layer_norm(*leaves, eps=1e-3), leaves, dy)
    centred = x - x.mean(-1, keepdim=True)
    rstd = (centred.pow(2).mean(-1, keepdim=True) + 1e-3).rsqrt()
    x_hat, wdy = centred * rstd, weight * dy
    dx = rstd * (wdy - wdy.mean(-1, keepdim=True) - x_hat * (wdy * x_hat).mean(-1, keepdim=True))
    for ours, wanted in zip(found, (dx, (dy * x_hat).sum(0), dy.sum(0)), strict=True):
        torch.testing.assert_close(ours, wanted)


def test_errors_say_what_was_given_and_what_is_allowed():
    x = torch.ones(4, 8)
    with pytest.raises(InputError, match=r"layer_norm: bias is \(7,\); needs \(8,\), the last dimension of x"):
        ops.layer_norm(x, None, torch.ones(7))
    match = r"layer_norm: weight is torch\.bfloat16, x is torch\.float32; they must have one dtype\. Cast one of them\."
    with pytest.raises(InputError, match=match):
        ops.layer_norm(x, torch.ones(8).bfloat16())


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("device", DEVICES)
def test_layer_norm_of_a_constant_row_is_its_bias(device, value, n):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.full((3, n), value, device=device, dtype=dtype)
        weight, bias = torch.ones(n, device=device, dtype=dtype), torch.arange(n, device=device).to(dtype)
        y = ops.layer_norm(x, weight, bias, backend="triton")
        torch.testing.assert_close(y, bias.expand(3, n), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("device", DEVICES)
def test_layer_norm_of_rows_far_from_zero(device, n):
    """Forward and backward, no worse than torch."""
    g = torch.Generator().manual_seed(0)
    rows, dy = (1e4 + 1e-2 * torch.randn(4, n, generator=g)).to(device), torch.randn(4, n, generator=g).to(device)

    def both(function, x, dy):
        x = x.detach().requires_grad_()
        y = function(x)
        return y.detach(), *torch.autograd.grad(y, x, dy)

    def plain(x):
        return F.layer_norm(x, (n,))

    wanted = both(plain, rows.double(), dy.double())
    made, torchs = both(lambda x: ops.layer_norm(x, backend="triton"), rows, dy), both(plain, rows, dy)
    for ours, theirs, truth in zip(made, torchs, wanted, strict=True):
        error, allowed = ((t.double() - truth).norm() / truth.norm() for t in (ours, theirs))
        assert error <= max(float(allowed), 1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_layer_norm_of_numbers_that_are_none_or_whose_squares_overflow(device):
    """As torch: NaN and infinity take the row; a variance beyond float32 gives zeros."""
    x = torch.ones(4, 333, device=device)
    x[0, 5], x[1, 7], x[2, ::2] = torch.nan, torch.inf, -1e30
    x[3] = 1e30
    y = ops.layer_norm(x, backend="triton")
    assert y[:2].isnan().all()
    assert (y[2:] == 0).all()
