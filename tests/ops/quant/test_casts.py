"""What holds for every cast: a batch is its matrices, dequantize knows the granularity, a gradient is refused."""

import pytest
import torch
from torch.testing import assert_close

from tilewright import use_backend
from tilewright.errors import InputError
from tilewright.ops.quant.dequantize import dequantize
from tilewright.ops.quant.per_block_cast_to_fp8 import per_block_cast_to_fp8
from tilewright.ops.quant.per_channel_cast_to_fp8 import per_channel_cast_to_fp8
from tilewright.ops.quant.per_tensor_cast_to_fp8 import per_tensor_cast_to_fp8
from tilewright.ops.quant.per_token_cast_to_fp8 import per_token_cast_to_fp8

CASTS = (per_token_cast_to_fp8, per_channel_cast_to_fp8, per_block_cast_to_fp8, per_tensor_cast_to_fp8)


@pytest.fixture(autouse=True)
def _reference():
    with use_backend("torch"):
        yield


@pytest.fixture
def x():
    return torch.randn(200, 333).bfloat16()


def assert_same(made, expected):
    """Two pairs of q and scales."""
    assert torch.equal(made[0].contiguous().view(torch.uint8), expected[0].contiguous().view(torch.uint8))
    assert torch.equal(made[1], expected[1])


@pytest.mark.parametrize("cast", CASTS[:3])
def test_a_batch_is_its_matrices(cast):
    x = torch.randn(2, 3, 130, 140).bfloat16()
    q, scales = cast(x)
    for i in range(2):
        for j in range(3):
            assert_same((q[i, j], scales[i, j]), cast(x[i, j]))


@pytest.mark.parametrize("cast", CASTS)
def test_dequantize_knows_each_cast_by_its_shapes(x, cast):
    q, scales = cast(x)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        y = dequantize(q, scales, dtype=dtype)
        assert y.dtype == dtype
        # half a step of e4m3, or of the smallest numbers of a block
        assert_close(y.float(), x.float(), rtol=2.0**-4 + 2.0**-8, atol=float(scales.max()) * 2.0**-9)


@pytest.mark.parametrize("cast", CASTS)
def test_a_gradient_is_refused(cast):
    x = torch.randn(4, 128, requires_grad=True)
    with pytest.raises(InputError, match="8-bit numbers have none"):
        cast(x)
    with torch.no_grad():
        assert_same(cast(x), cast(x.detach()))
