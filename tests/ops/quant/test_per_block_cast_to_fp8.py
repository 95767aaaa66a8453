"""per_block_cast_to_fp8: DeepGEMM's cast of weights bit for bit, plain or transposed."""

import pytest
import torch

from tilewright.errors import InputError
from tilewright.ops.quant.layout import BLOCK
from tilewright.ops.quant.per_block_cast_to_fp8 import per_block_cast_to_fp8

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn


def deep_gemm(x, ue8m0):
    """The cast of DeepGEMM's own tests, whose division by 448 a GPU computes as a product."""
    n, k = x.shape
    padded = torch.nn.functional.pad(x, (0, -k % 128, 0, -n % 128))
    blocks = padded.view(-1, 128, padded.shape[1] // 128, 128)
    scale = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) * torch.tensor(1 / 448.0)
    if ue8m0:
        scale = torch.pow(2.0, torch.ceil(torch.log2(scale.abs())))
    q = (blocks * (1.0 / scale)).to(FP8)
    return q.view_as(padded)[:n, :k].contiguous(), scale[:, 0, :, 0]


def assert_bits(actual, expected):
    assert torch.equal(actual[0].contiguous().view(torch.uint8), expected[0].contiguous().view(torch.uint8))
    assert torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_deep_gemms_cast_bit_for_bit(dtype, ue8m0):
    x = (torch.randn(200, 333) * torch.exp2(torch.randint(-12, 12, (200, 1)))).to(dtype)
    assert_bits(per_block_cast_to_fp8(x, ue8m0=ue8m0), deep_gemm(x, ue8m0))


@pytest.mark.parametrize("ue8m0", [False, True])
def test_transposed_it_is_the_cast_of_the_transpose(ue8m0):
    x = torch.randn(200, 333).bfloat16()
    q, scales = per_block_cast_to_fp8(x, transpose=True, ue8m0=ue8m0)
    assert_bits((q, scales), per_block_cast_to_fp8(x.mT.contiguous(), ue8m0=ue8m0))
    assert q.is_contiguous()


@pytest.mark.parametrize("transpose", [False, True])
def test_scales_lie_where_the_products_read_them(transpose):
    q, scales = per_block_cast_to_fp8(torch.randn(2, 200, 333), transpose=transpose)
    assert BLOCK.mismatch(scales, *q.shape[-2:]) is None
    assert scales.is_contiguous()


def test_an_outlier_coarsens_its_block_alone():
    """The scale of 2^20 is 2341, and 1 / 2341 is less than half of 2^-9, the least number of e4m3."""
    x = torch.ones(256, 256)
    x[130, 7] = 2.0**20
    q, scales = per_block_cast_to_fp8(x)
    assert (scales > 1).tolist() == [[False, False], [True, False]]
    values = q.float()
    assert (values[128:, :128] == 0).sum() == 128 * 128 - 1
    assert (values[:128] == 448).all() and (values[128:, 128:] == 448).all()


def test_a_vector_is_refused():
    with pytest.raises(InputError) as error:
        per_block_cast_to_fp8(torch.ones(128))
    assert str(error.value) == "per_block_cast_to_fp8: x is (128,); needs (..., N, K). Unsqueeze a vector."
