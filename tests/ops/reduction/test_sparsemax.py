"""sparsemax(x): the nearest point of the simplex, by Newton's steps or a sort."""

import pytest
import torch

from tilewright.ops.reduction.sparsemax import SparsemaxArgs, SparsemaxBackwardArgs, sparsemax

DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]


def test_small_rows_by_hand():
    x = torch.tensor([[0.0, 0.0, 0.0], [2.0, 0.5, 0.0], [0.5, 0.2, -3.0], [7.0, 7.0, -7.0]])
    y = torch.tensor([[1 / 3, 1 / 3, 1 / 3], [1.0, 0.0, 0.0], [0.65, 0.35, 0.0], [0.5, 0.5, 0.0]])
    torch.testing.assert_close(sparsemax(x), y)
    torch.testing.assert_close(sparsemax(x.mT, 0).mT, y)
    torch.testing.assert_close(sparsemax(x + 100), y, rtol=0, atol=1e-5)


def test_it_is_the_nearest_point_of_the_simplex():
    """Of a projection y, (x - y) . (p - y) <= 0 for every point p of the set; for a simplex its corners suffice."""
    x = torch.randn(5, 30, dtype=torch.float64)
    y = sparsemax(x)
    assert (y >= 0).all()
    assert ((y > 0).sum(-1) < 30).all()
    torch.testing.assert_close(y.sum(-1), torch.ones(5, dtype=torch.float64))
    assert (x - y <= ((x - y) * y).sum(-1, keepdim=True) + 1e-12).all()


def test_the_gradient_is_that_of_the_formula():
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: sparsemax(t, 1), (x,))
    assert torch.autograd.gradgradcheck(sparsemax, (x,))


def test_rows_of_nan_and_infinities():
    x = torch.zeros(4, 3)
    x[0, 1], x[1, 2], x[2], x[3, 0] = torch.nan, torch.inf, -torch.inf, -torch.inf
    x.requires_grad_()
    y = sparsemax(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    for t in (y, dx):
        assert t[:3].isnan().all()
        assert t[3].isfinite().all()
    assert torch.equal(y[3], torch.tensor([0.0, 0.5, 0.5]))


def _rows(device: str) -> torch.Tensor:
    """Peaked, flat, equal and hidden rows, NaN and infinities, and distances to the largest that halve."""
    x = torch.randn(9, 300, device=device)
    x[0], x[2], x[3] = 3 * x[0], x[2] / 100, 0
    x[4, ::3] = -torch.inf
    x[5, 299], x[6, 298], x[7] = torch.nan, torch.inf, -torch.inf
    x[8] = -1 + 2.0 ** -(torch.arange(300, device=device) % 20)
    return x


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy, in the interpreter's maximum
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("device", DEVICES)
def test_one_tile_and_several(device, dtype):
    from tilewright.ops.reduction.kernels.triton import sparsemax as kernels

    x = _rows(device).to(dtype)
    expected = sparsemax(x.double())
    y, dy = expected.to(dtype), torch.randn(9, 300, device=device).to(dtype)
    support = y > 0
    mean = torch.where(support, dy, 0).double().sum(-1, keepdim=True) / support.sum(-1, keepdim=True)
    wanted = torch.where(y.isnan(), torch.nan, torch.where(support, dy.double() - mean, 0))
    rtol, atol = (2.0**-8, 1e-7) if dtype is torch.bfloat16 else (1e-6, 1e-7)
    for config in (kernels.Config(512, 1), kernels.Config(128, 1)):
        out, dx = torch.full_like(x, 7.0), torch.full_like(x, 7.0)
        kernels.launch((out,), SparsemaxArgs(x), config)
        torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol, equal_nan=True)
        kernels.launch_backward((dx,), SparsemaxBackwardArgs(dy, y), config)
        torch.testing.assert_close(dx.double(), wanted, rtol=rtol, atol=4 * atol, equal_nan=True)
