"""hadamard_transform: the matrices, the transform as a product with one, and its inverse, itself."""

import pytest
import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops.quant.hadamard import SQUARES, factor, largest_block, rows_of
from tilewright.ops.quant.hadamard_transform import hadamard_transform

PLACES = [
    pytest.param("torch", "cpu", id="torch"),
    pytest.param("triton", "cpu", marks=pytest.mark.interp, id="interpreted"),
    pytest.param("triton", "cuda", marks=pytest.mark.gpu, id="cuda"),
]
ERRORS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-21}


def sylvester(n: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < n:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix


def dense(n: int) -> Tensor:
    m = factor(n)
    small = torch.ones(1, 1) if m == 1 else torch.tensor(rows_of(m))
    return torch.kron(small.double(), sylvester(n // m))


@pytest.mark.parametrize("m", SQUARES)
def test_a_paley_matrix_is_symmetric_and_its_own_inverse(m):
    matrix = torch.tensor(rows_of(m))
    assert set(matrix.flatten().tolist()) == {-1, 1}
    assert torch.equal(matrix, matrix.T)
    assert torch.equal(matrix @ matrix, m * torch.eye(m, dtype=matrix.dtype))


def test_the_sizes_that_have_a_matrix():
    assert [n for n in range(65) if factor(n) is not None] == [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64]
    assert [factor(n) for n in (3584, 4096, 5120, 11008, 14336, 28672)] == [28, 1, 20, None, 28, 28]
    assert [largest_block(n) for n in (11008, 14336, 192, 6, 65536)] == [256, 14336, 192, 2, 32768]


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_it_is_the_product_with_the_matrix(backend, device, dtype):
    for n in (4, 36, 64, 80, 112, 256, 576):
        x = torch.randn(3, n, device=device).to(dtype)
        wanted = x.double() @ dense(n).to(device)
        y = hadamard_transform(x, 1.0, backend=backend)
        assert y.dtype == dtype
        assert (y.double() - wanted).norm() < ERRORS[dtype] * wanted.norm()
        orthonormal = hadamard_transform(x, backend=backend).double()
        assert (orthonormal - wanted * n**-0.5).norm() < ERRORS[dtype] * x.double().norm()


@pytest.mark.parametrize("n", [448, 18432])
@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_it_undoes_itself(backend, device, n):
    """18432 is divided into two halves by the kernel."""
    x = torch.randn(2, n, device=device)
    again = hadamard_transform(hadamard_transform(x, backend=backend), backend=backend)
    torch.testing.assert_close(again, x, rtol=0, atol=1e-5)
    wanted = hadamard_transform(x.double())
    torch.testing.assert_close(hadamard_transform(x, backend=backend).double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_infinities_and_nans_are_those_of_sums(backend, device, dtype):
    """An infinity makes infinities, two of them NaN where their signs differ; the largest numbers stay finite."""
    x = torch.randn(5, 256, device=device).to(dtype)
    x[0, 3], x[1, 7] = torch.inf, torch.nan
    x[2, 5], x[2, 80] = torch.inf, -torch.inf
    x[3] = 0.0
    x[3, 9] = torch.finfo(dtype).max
    y = hadamard_transform(x, backend=backend)
    wanted = x.double().nan_to_num(0.0, 0.0, 0.0) @ dense(256).to(device) / 16
    matrix = dense(256).to(device)
    assert torch.equal(y[0].double(), matrix[3] * torch.inf)
    assert y[1].isnan().all()
    assert torch.equal(y[2].isnan(), matrix[5] == matrix[80])
    torch.testing.assert_close(y[3:].double(), wanted[3:], rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-5)


def test_gradients():
    x = torch.randn(2, 24, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(hadamard_transform, (x, 0.3))
    assert torch.autograd.gradgradcheck(hadamard_transform, (x,))


def test_a_transposed_x_and_out():
    x = torch.randn(64, 5)
    out = torch.empty(5, 64)
    assert hadamard_transform(x.mT, out=out) is out
    torch.testing.assert_close(out, hadamard_transform(x.mT.contiguous()))


@pytest.mark.parametrize("n", [0, 11, 44, 11008, 65536])
def test_other_sizes_are_refused_by_name(n):
    with pytest.raises(InputError, match=f"the last dimension of x is {n}; needs 2\\^k or m \\* 2\\^k"):
        hadamard_transform(torch.empty(1, n))
