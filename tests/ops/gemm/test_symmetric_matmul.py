"""symmetric_matmul: the lower triangle of the product and its mirror, bit for bit."""

import pytest
import torch

from tilewright.errors import InputError
from tilewright.ops import symmetric_matmul

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.interp)]


def exact(a, b=None, c=None, alpha=1.0, beta=1.0):
    """The lower triangle in float64, mirrored."""
    d = alpha * a.double() @ (a if b is None else b).double().mT
    d = d if c is None else d + beta * c.double()
    return d.tril() + d.tril(-1).mT


def operands(batch, m, k, dtype=torch.float32):
    g = torch.Generator().manual_seed(m)
    return tuple(torch.randn(batch, m, size, generator=g).to(dtype) for size in (k, k, m))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("m", [130, 300])
def test_every_tile_of_the_triangle_and_its_mirror(backend, m):
    """a b^T and c are not symmetric here: only their lower triangle is used.  300: several groups of tiles."""
    a, b, c = operands(2, m, 20)
    d = symmetric_matmul(a, b, c=c, alpha=-0.5, beta=0.25, backend=backend)
    torch.testing.assert_close(d.double(), exact(a, b, c, -0.5, 0.25), rtol=1e-5, atol=1e-5)
    assert torch.equal(d, d.mT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_matrix_in_place_of_c(backend):
    a, _, c = operands(1, 40, 24, torch.bfloat16)
    wanted = exact(a[0], None, c[0])
    into = c[0].clone()
    assert symmetric_matmul(a[0], c=into, out=into, backend=backend) is into
    torch.testing.assert_close(into.double(), wanted, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_strides_and_numbers_that_are_not_finite(backend):
    """The memory of a is transposed; NaN and infinity reach their rows and columns, and a NaN above the diagonal of c
    reaches nothing.
    """
    a, _, c = operands(1, 24, 40)
    a = a[0].mT.contiguous().mT
    a[3, 5], a[20, 1] = torch.nan, torch.inf
    c[0, 2, 9] = torch.nan
    d = symmetric_matmul(a, c=c[0], backend=backend)
    finite = d.isfinite()
    assert not finite[[3, 20]].any() and not finite[:, [3, 20]].any()
    rest = [i for i in range(24) if i not in (3, 20)]
    torch.testing.assert_close(
        d.double()[rest][:, rest], exact(a[rest], None, c[0][rest][:, rest]), rtol=1e-5, atol=1e-5
    )


def test_gradients_are_refused():
    a = torch.ones(4, 8, requires_grad=True)
    with pytest.raises(InputError, match=r"has no gradient, and an operand requires one. Use bmm"):
        symmetric_matmul(a)
    with torch.no_grad():
        assert torch.equal(symmetric_matmul(a), torch.full((4, 4), 8.0))
