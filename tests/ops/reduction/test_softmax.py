"""softmax(x, dim): float32 inside, one rounding; special values as in torch."""

import pytest
import torch

from tilewright.errors import InputError
from tilewright.ops.reduction.softmax import softmax

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_it_is_hugging_faces_softmax_bit_for_bit(dtype, scale):
    """Attention and routers write softmax(x, dim=-1, dtype=torch.float32).to(x.dtype)."""
    x = (torch.randn(3, 5, 333) * scale).to(dtype)
    assert torch.equal(softmax(x), torch.softmax(x, -1, dtype=torch.float32).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_formula_rounded_once(dtype):
    x = (torch.randn(5, 333) * 3).to(dtype)
    powers = torch.exp(x.double() - x.double().amax(-1, keepdim=True))
    wanted = powers / powers.sum(-1, keepdim=True)
    torch.testing.assert_close(softmax(x).double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nan(dtype, backend):
    """-inf gives 0; a row is NaN if all of it is -inf, or if it has NaN or +inf."""
    x = torch.zeros(5, 40, dtype=dtype)
    x[0, ::2] = -torch.inf
    x[1, :], x[2, 7], x[3, 39] = -torch.inf, torch.nan, torch.inf
    y = softmax(x, backend=backend)
    assert torch.equal(y[0], torch.tensor([0.0, 0.05]).repeat(20).to(dtype))
    assert y[1:4].isnan().all()
    assert torch.equal(y[4], torch.full((40,), 0.025, dtype=dtype))


@pytest.mark.parametrize("dim", [0, 1, -2, 2, -1])
def test_any_dimension_gives_what_the_last_would(dim):
    x = torch.randn(4, 6, 5).bfloat16()
    made = softmax(x, dim)
    assert made.shape == x.shape
    assert torch.equal(made, softmax(x.movedim(dim, -1).contiguous()).movedim(-1, dim))


def test_the_gradient_is_that_of_the_formula():
    x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(softmax, (x,))
    assert torch.autograd.gradcheck(lambda t: softmax(t, 1), (x,))


def test_a_dimension_that_is_not_there_is_refused():
    with pytest.raises(InputError, match=r"dim is 3, x is \(2, 4\); needs -2 <= dim < 2"):
        softmax(torch.ones(2, 4), 3)


def test_integers_are_refused():
    with pytest.raises(InputError, match=r"softmax: x is torch\.int64; needs one of bfloat16, float16, float32\. Cast"):
        softmax(torch.ones(2, 4, dtype=torch.int64))


def test_out_is_for_the_last_dimension():
    x, out = torch.randn(2, 4), torch.empty(2, 4)
    assert softmax(x, out=out) is out
    assert torch.equal(out, softmax(x))
    with pytest.raises(InputError, match="works along the last dimension, dim is 0"):
        softmax(x, 0, out=out)
