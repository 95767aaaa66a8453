"""log_softmax(x, dim, dtype): torch's dtypes, special values and gradients; every form of the kernels."""

import pytest
import torch

from tilewright.errors import InputError
from tilewright.ops.reduction.log_softmax import LogSoftmaxArgs, LogSoftmaxBackwardArgs, log_softmax

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize("wanted", [*DTYPES, torch.float64])
def test_dtype_is_torchs(given, wanted):
    """x is cast first, so narrowing rounds x, and widening computes in the wider dtype; the gradient has x's dtype."""
    x = torch.randn(4, 3, 33).to(given).requires_grad_()
    y, expected = log_softmax(x, 1, wanted), torch.log_softmax(x, 1, dtype=wanted)
    assert y.dtype == wanted
    limit = 0.02 if wanted.itemsize == 2 else None  # torch on a CPU rounds twice, and sums in 16 bits
    torch.testing.assert_close(y, expected, rtol=limit, atol=limit)
    dy = torch.randn_like(expected)
    (dx,), (wanted_dx,) = (torch.autograd.grad(out, x, dy) for out in (y, expected))
    assert dx.dtype == given
    torch.testing.assert_close(dx, wanted_dx, rtol=limit, atol=limit)


def special_rows(n, device="cpu"):
    x = torch.randn(7, n, device=device) * 3
    x[1, ::2] = -torch.inf
    x[2, :] = -torch.inf  # all NaN, as are the next two
    x[3, n - 2] = torch.nan
    x[4, 2] = torch.inf
    x[5, : n - 1] = -torch.inf  # the last element alone: 0
    x[6, n - 1] = 60.0  # one element takes nearly all
    return x


def test_special_values_are_torchs():
    x, dy = special_rows(40).requires_grad_(), torch.randn(7, 40)
    y, expected = log_softmax(x), torch.log_softmax(x, -1)
    torch.testing.assert_close(y, expected, equal_nan=True)
    (dx,), (wanted,) = (torch.autograd.grad(out, x, dy) for out in (y, expected))
    torch.testing.assert_close(dx, wanted, equal_nan=True)


def test_the_gradient_is_that_of_the_formula():
    x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(log_softmax, (x,))
    assert torch.autograd.gradcheck(lambda t: log_softmax(t, 1), (x,))


def test_out_is_for_the_last_dimension():
    x, out = torch.randn(2, 4).bfloat16(), torch.empty(2, 4)
    assert log_softmax(x, dtype=torch.float32, out=out) is out
    torch.testing.assert_close(out, torch.log_softmax(x.float(), -1))
    with pytest.raises(InputError, match="works along the last dimension, dim is 0"):
        log_softmax(x, 0, out=out)


def configs(unaligned):
    """A kernel's module, and its configuration for each form at 300 to 600 columns."""
    from tilewright.ops.reduction.kernels.triton import softmax, softmax_unaligned

    module = softmax_unaligned if unaligned else softmax
    config = softmax_unaligned.UnalignedConfig if unaligned else softmax.Config
    short, long = config(1024, num_warps=4), config(256, num_warps=1, steps=1)
    return module, (short, short._replace(rows=4), long, long._replace(split=128))


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy, in the interpreter's maximum
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("n", [304, 517])
@pytest.mark.parametrize("device", DEVICES)
def test_every_form(device, n, dtypes):
    x = special_rows(n, device).to(dtypes[0])
    expected = torch.log_softmax(x.double(), -1)
    dy = torch.randn(7, n, device=device).to(dtypes[1])
    y = expected.to(dtypes[1])
    wanted = dy.double() - y.double().exp() * dy.double().sum(-1, keepdim=True)
    limits = {torch.bfloat16: 2.0**-8, torch.float32: 1e-5}
    for unaligned in (False, True):
        module, forms = configs(unaligned)
        for config in forms:
            out = torch.full_like(y, 7.0)
            module.launch_log((out,), LogSoftmaxArgs(x, out.dtype, x.dtype), config)
            torch.testing.assert_close(out.double(), expected, rtol=limits[dtypes[1]], atol=1e-6, equal_nan=True)
            if not config.split:
                dx = torch.full_like(x, 7.0)
                module.launch_log_backward((dx,), LogSoftmaxBackwardArgs(dy, y, x.dtype), config)
                torch.testing.assert_close(dx.double(), wanted, rtol=limits[dtypes[0]], atol=1e-5, equal_nan=True)
