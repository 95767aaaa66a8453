"""The three forms of the Triton softmax, each forced by its configuration on rows short enough for the interpreter."""

import pytest
import torch

from tilewright.ops.reduction.softmax import SoftmaxArgs, SoftmaxBackwardArgs
from tilewright.ops.rows import RowsBucket

N = 5000
DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture
def kernels():
    from tilewright.ops.reduction.kernels.triton import softmax as triton

    return triton


@pytest.fixture
def forms(kernels):
    """Configurations by what they exercise at N = 5000."""
    config = kernels.Config
    return {
        "short": config(8192, num_warps=8),
        "short, rows in one tile": config(8192, num_warps=8, rows=2),
        "long, one step": config(4096, num_warps=4, steps=2),
        "long, several steps": config(1024, num_warps=4, steps=2),
        "long, steps prefetched": config(1024, num_warps=4, steps=1, num_stages=3),
        "split": config(1024, num_warps=4, split=512),
        "split, parts not a power of two": config(1024, num_warps=4, split=1024),
    }


def special_rows(dtype, device):
    """Rows whose result needs no tolerance for its special values."""
    x = torch.randn(10, N, device=device) * 3
    x[1, ::2] = -torch.inf  # hidden elements
    x[2, :] = -torch.inf  # everything hidden: NaN
    x[3, 4321] = torch.nan
    x[4, 17] = torch.inf
    x[5, :4999] = -torch.inf  # only the last element, in the tail of every form
    x[6, :] = torch.finfo(dtype).min  # hidden by a finite mask: uniform
    x[7, :] = 60000.0  # exp overflows without the maximum
    x[8, :1024] = -torch.inf  # a first part with nothing in it
    x[9, 4999] = 1000.0  # one element takes all
    return x.to(dtype)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy, in the interpreter's maximum
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_every_form_on_special_rows(kernels, forms, device, dtype):
    x = special_rows(dtype, device)
    expected = torch.softmax(x.double(), -1)
    limit = 1e-5 if dtype is torch.float32 else 2.0**-8
    for name, config in forms.items():
        y = torch.full_like(x, 7.0)
        kernels.launch((y,), SoftmaxArgs(x), config)
        torch.testing.assert_close(
            y.double(), expected, rtol=limit, atol=1e-12, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_every_form_of_the_backward(kernels, forms, device, dtype):
    y = torch.softmax(torch.randn(5, N, device=device) * 3, -1).to(dtype)
    dy = torch.randn(5, N, device=device).to(dtype)
    wide, grads = y.double(), dy.double()
    expected = wide * (grads - (grads * wide).sum(-1, keepdim=True))
    limit = 1e-4 if dtype is torch.float32 else 2.0**-7
    for name, config in forms.items():
        dx = torch.full_like(y, torch.nan)
        kernels.launch_backward((dx,), SoftmaxBackwardArgs(dy, y), config._replace(split=0))
        torch.testing.assert_close(dx.double(), expected, rtol=limit, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.gpu
def test_packed_elements_change_no_bit(kernels):
    x = special_rows(torch.bfloat16, "cuda")
    dy = torch.randn_like(x)
    y = torch.softmax(x, -1)
    for config in (kernels.Config(8192, num_warps=4, rows=2), kernels.Config(4096, num_warps=4)):
        plain, packed = (torch.empty_like(x) for _ in range(2))
        for launch, args in ((kernels.launch, SoftmaxArgs(x)), (kernels.launch_backward, SoftmaxBackwardArgs(dy, y))):
            launch((plain,), args, config)
            launch((packed,), args, config._replace(packed=True))
            assert torch.equal(plain.view(torch.int16), packed.view(torch.int16))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_apart_in_memory_are_read_where_they_are(kernels, forms, device):
    wide = torch.full((4, N + 30), torch.nan, device=device)
    x = wide[:, 7 : N + 7].normal_()
    for config in forms.values():
        y = torch.empty(4, N, device=device)
        kernels.launch((y,), SoftmaxArgs(x), config)
        torch.testing.assert_close(y, torch.softmax(x, -1))


@pytest.mark.gpu
def test_candidates_are_right_at_the_size_they_are_for(kernels):
    for m, n in ((300, 4096), (70, 32768), (70, 50000), (8, 128256)):
        x = torch.randn(m, n, device="cuda").bfloat16()
        expected = torch.softmax(x, -1)
        for config in kernels.candidates(RowsBucket(m, n), x.dtype)[::3]:
            y = torch.full_like(x, torch.nan)
            kernels.launch((y,), SoftmaxArgs(x), config)
            torch.testing.assert_close(y, expected, msg=lambda text, at=(m, n, config): f"{at}: {text}")
