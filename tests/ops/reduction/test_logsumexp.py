"""logsumexp(x, dim, keepdim): torch's results and special values; every form of the kernels."""

import pytest
import torch

from tilewright.ops.reduction.logsumexp import LogsumexpArgs, LogsumexpBackwardArgs, logsumexp

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dim", [0, 1, -2, 2, -1])
@pytest.mark.parametrize("keepdim", [False, True])
def test_any_dimension(dim, keepdim):
    x = torch.randn(4, 6, 5)
    torch.testing.assert_close(logsumexp(x, dim, keepdim), torch.logsumexp(x, dim, keepdim))


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_rounded_once_and_its_gradient_is_by_the_exact_sum(dtype):
    x = torch.randn(5, 333).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    y, expected = logsumexp(x), torch.logsumexp(wide, -1)
    torch.testing.assert_close(y, expected.to(dtype))
    (dx,), (wanted,) = (torch.autograd.grad(out.sum(), given) for out, given in ((y, x), (expected, wide)))
    torch.testing.assert_close(dx.double(), wanted, rtol=torch.finfo(dtype).eps, atol=2e-7)


def special_rows(n, device="cpu"):
    x = torch.randn(8, n, device=device) * 3
    x[1, ::2] = -torch.inf
    x[2, :] = -torch.inf
    x[3, n - 2] = torch.nan
    x[4, 2] = torch.inf
    x[5, : n - 1] = -torch.inf  # the last element alone
    x[6, [1, n - 1]] = torch.tensor([torch.inf, torch.nan], device=device)
    x[7, :] = torch.finfo(torch.bfloat16).max
    return x


def test_special_values_are_torchs():
    x = special_rows(40).requires_grad_()
    y, expected = logsumexp(x), torch.logsumexp(x, -1)
    torch.testing.assert_close(y, expected, equal_nan=True)
    (dx,), (wanted,) = (torch.autograd.grad(out.nansum(), x) for out in (y, expected))
    torch.testing.assert_close(dx, wanted, equal_nan=True)


def test_the_gradient_is_that_of_the_formula():
    x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(logsumexp, (x,))
    assert torch.autograd.gradgradcheck(lambda t: logsumexp(t, 1, keepdim=True), (x,))


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy, in the interpreter's maximum
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [517, 1104, 1301])
@pytest.mark.parametrize("device", DEVICES)
def test_every_form(device, n, dtype):
    from tilewright.ops.reduction.kernels.triton import logsumexp as kernels

    x = special_rows(n, device).to(dtype)
    expected = torch.logsumexp(x.double(), -1)
    forms = (kernels.Config(1, rows=4), kernels.Config(1, steps=2), kernels.Config(1, steps=1, split=512))
    for config in forms[:1] if n <= kernels.SHORT else forms[1:]:
        y, lse = torch.full((8,), 7.0, dtype=dtype, device=device), torch.full((8,), 7.0, device=device)
        kernels.launch((y, lse), LogsumexpArgs(x), config)
        torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert torch.equal(y.nan_to_num(nan=5.0), lse.to(dtype).nan_to_num(nan=5.0))
    dy, dx = torch.randn(8, device=device).to(dtype), torch.full_like(x, 7.0)
    wanted = dy.double()[:, None] * torch.exp(x.double() - expected[:, None])
    args = LogsumexpBackwardArgs(x, expected.float(), dy)
    kernels.launch_backward((dx,), args, kernels.TileConfig(256, 1))
    torch.testing.assert_close(dx.double(), wanted, rtol=2.0**-8, atol=1e-6, equal_nan=True)
