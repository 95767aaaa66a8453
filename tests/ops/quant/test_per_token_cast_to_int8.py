"""per_token_cast_to_int8: the bits of the arithmetic in `quant/int8.py` on every backend, and divisors of channels."""

import pytest
import torch

from tilewright import ops
from tilewright.errors import InputError
from tilewright.nn import smoothing_factors
from tilewright.ops.quant.int8 import quantise_rows

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.interp)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ties_bounds_and_magnitudes(dtype, backend):
    """Multiples of half a step, on both sides of zero; the smallest rows; views."""
    ties = torch.arange(-254, 255) / 2
    x = torch.stack([ties, ties * 2.0**-20, torch.zeros(509), torch.full((509,), 6e-8)]).to(dtype)
    q, scales = ops.per_token_cast_to_int8(x, backend=backend)
    wanted, channel = quantise_rows(x)
    assert (q.dtype, q.shape, scales.dtype, scales.shape) == (torch.int8, x.shape, torch.float32, (4, 1))
    assert torch.equal(q, wanted) and torch.equal(scales[:, 0], channel)
    assert q.min() == -127
    view = torch.stack([x, x], 1)[:, 1]
    assert all(map(torch.equal, ops.per_token_cast_to_int8(view, backend=backend), (q, scales)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [33, 17000])
def test_divisors_of_channels(k, backend):
    g = torch.Generator().manual_seed(0)
    x, smooth = torch.randn(2, k, generator=g), torch.rand(k, generator=g) + 0.1
    q, scales = ops.per_token_cast_to_int8(x.bfloat16(), smooth=smooth, backend=backend)
    wanted, channel = quantise_rows(x.bfloat16().float() / smooth)
    assert torch.equal(q, wanted) and torch.equal(scales[:, 0], channel)
    strided = torch.stack([smooth, smooth], 1)[:, 0]
    assert torch.equal(ops.per_token_cast_to_int8(x.bfloat16(), smooth=strided, backend=backend)[0], q)
    smooth[3] = 0.0
    q, scales = ops.per_token_cast_to_int8(x, smooth=smooth, backend=backend)
    assert scales.isinf().all() and not q.any()


def test_smooth_quant_needs_no_norm():
    """Divided activations times multiplied weights are the same product, nearer to it where channels are outliers."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 96), torch.randn(40, 96)
    x[:, 5] *= 80
    exact = x.double() @ w.double().T
    factors = smoothing_factors(x.abs().amax(0), w.abs().amax(0))

    def error(smooth, weight):
        (q, scales), (b, channels) = ops.per_token_cast_to_int8(x, smooth=smooth), ops.per_token_cast_to_int8(weight)
        got = ops.int8_matmul(q, b, scales, channels, out_dtype=torch.float32)
        return (got.double() - exact).norm() / exact.norm()

    assert error(factors, w * factors) < 0.5 * error(None, w)


def test_a_gradient_is_refused():
    x = torch.ones(2, 4)
    with pytest.raises(InputError, match="a gradient is wanted"):
        ops.per_token_cast_to_int8(x.requires_grad_())
    with pytest.raises(InputError, match="a gradient is wanted"):
        ops.per_token_cast_to_int8(x.detach(), smooth=torch.ones(4, requires_grad=True))
