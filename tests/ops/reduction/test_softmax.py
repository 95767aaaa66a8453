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


def test_out_is_for_the_last_dimension():
    x, out = torch.randn(2, 4), torch.empty(2, 4)
    assert softmax(x, out=out) is out
    assert torch.equal(out, softmax(x))
    with pytest.raises(InputError, match="works along the last dimension, dim is 0"):
        softmax(x, 0, out=out)
