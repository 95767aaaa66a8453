"""What ties the casts to each other: transposes, batches, granularities, layouts; and what they refuse."""

import pytest
import torch
from torch.testing import assert_close

from tilewright import use_backend
from tilewright.errors import InputError
from tilewright.ops.quant.dequantize import dequantize
from tilewright.ops.quant.layout import BLOCK, ROW, TOKEN, TOKEN_UE8M0
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


def test_a_transposed_cast_is_the_cast_of_the_transpose(x):
    turned = x.mT.contiguous()
    assert_same(per_block_cast_to_fp8(x, transpose=True), per_block_cast_to_fp8(turned))
    assert_same(per_channel_cast_to_fp8(x, transpose=True), per_token_cast_to_fp8(turned))


def test_channels_are_the_same_either_way(x):
    (q, scales), (turned, turned_scales) = per_channel_cast_to_fp8(x), per_channel_cast_to_fp8(x, transpose=True)
    assert_same((q, scales), (turned.mT, turned_scales.mT))
    assert scales.stride() == (336, 1)


def test_scales_lie_where_the_products_read_them(x):
    pairs = (
        (TOKEN, per_token_cast_to_fp8(x)),
        (TOKEN_UE8M0, per_token_cast_to_fp8(x, packed=True)),
        (ROW, per_token_cast_to_fp8(x, group=None)),
        (BLOCK, per_block_cast_to_fp8(x)),
    )
    for layout, (q, scales) in pairs:
        assert layout.mismatch(scales, *q.shape) is None
    q, scales = per_channel_cast_to_fp8(x, transpose=True)
    assert TOKEN.mismatch(scales, *q.shape) is None


@pytest.mark.parametrize("cast", CASTS[:3])
def test_a_batch_is_its_matrices(cast):
    x = torch.randn(2, 3, 130, 140).bfloat16()
    q, scales = cast(x)
    for i in range(2):
        for j in range(3):
            assert_same((q[i, j], scales[i, j]), cast(x[i, j]))


def test_a_tensor_has_one_scale_whatever_its_shape():
    x = torch.randn(3, 10, 20)
    q, scale = per_tensor_cast_to_fp8(x)
    assert_same((q.view(1, -1), scale), per_token_cast_to_fp8(x.view(1, -1), group=None))
    assert scale.shape == (1, 1)


@pytest.mark.parametrize("cast", CASTS)
def test_dequantize_knows_each_cast_by_its_shapes(x, cast):
    q, scales = cast(x)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        y = dequantize(q, scales, dtype=dtype)
        assert y.dtype == dtype
        # half a step of e4m3, or of the smallest numbers of a block
        assert_close(y.float(), x.float(), rtol=2.0**-4 + 2.0**-8, atol=float(scales.max()) * 2.0**-9)
    out = torch.empty_like(x)
    assert dequantize(q, scales, out=out) is out
    assert torch.equal(out, dequantize(q, scales))


def test_dequantize_unpacks(x):
    q, words = per_token_cast_to_fp8(x, packed=True)
    same_q, scales = per_token_cast_to_fp8(x, ue8m0=True)
    assert torch.equal(dequantize(q, words), dequantize(same_q, scales))


def test_dequantize_takes_scales_of_any_strides_and_one_for_a_batch():
    x = torch.randn(3, 130, 140)
    q, scales = per_token_cast_to_fp8(x)
    assert torch.equal(dequantize(q, scales.contiguous()), dequantize(q, scales))
    q, scale = per_tensor_cast_to_fp8(x)
    assert torch.equal(dequantize(q, scale), dequantize(q, scale.expand(3, 1, 1)))


@pytest.mark.parametrize("cast", CASTS)
def test_a_gradient_is_refused(cast):
    x = torch.randn(4, 128, requires_grad=True)
    with pytest.raises(InputError, match="8-bit numbers have none"):
        cast(x)
    with torch.no_grad():
        assert_same(cast(x), cast(x.detach()))


def test_the_gradient_of_scales_is_refused():
    q, scales = per_token_cast_to_fp8(torch.randn(4, 128))
    with pytest.raises(InputError, match="8-bit numbers have none"):
        dequantize(q, scales.requires_grad_())


def test_a_scale_for_the_tensor_costs_a_second_read_of_what_the_cache_cannot_hold():
    from tilewright.dispatch import Sample
    from tilewright.hardware import device_info
    from tilewright.ops.quant.per_tensor_cast_to_fp8 import CONTRACT

    def read(m, n):
        return CONTRACT.cost(Sample((torch.empty(m, n, dtype=torch.bfloat16, device="meta"),)), "fwd").bytes_read

    cache = device_info("meta").l2_bytes
    assert cache > 0
    assert read(1, 4096) == 2 * 4096
    rows = cache // 4096  # twice the cache
    assert read(rows, 4096) == 2 * (2 * 4096 * rows) - cache
