"""per_channel_cast_to_fp8: a scale for 128 tokens of a channel, plain or transposed."""

import pytest
import torch

from tilewright.errors import InputError
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.quant.per_channel_cast_to_fp8 import per_channel_cast_to_fp8
from tilewright.ops.quant.per_token_cast_to_fp8 import per_token_cast_to_fp8

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn


def by_columns(x, ue8m0):
    """The formula, one column and 128 tokens at a time."""
    t, n = x.shape
    q, scales = torch.empty(t, n, dtype=FP8), torch.empty(-(-t // 128), n)
    for block in range(scales.shape[0]):
        rows = slice(128 * block, 128 * block + 128)
        for column in range(n):
            values = x[rows, column].float()
            scale = values.abs().max().clamp(1e-4) * torch.tensor(1 / 448.0)
            scale = torch.exp2(scale.log2().ceil()) if ue8m0 else scale
            scales[block, column] = scale
            q[rows, column] = (values * (1 / scale)).to(FP8)
    return q, scales


def assert_bits(actual, expected):
    assert torch.equal(actual[0].contiguous().view(torch.uint8), expected[0].contiguous().view(torch.uint8))
    assert torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_formula_column_by_column(dtype, ue8m0):
    x = (torch.randn(200, 9) * torch.exp2(torch.randint(-12, 12, (1, 9)))).to(dtype)
    assert_bits(per_channel_cast_to_fp8(x, ue8m0=ue8m0), by_columns(x, ue8m0))


def test_transposed_it_is_the_cast_of_the_rows_of_the_transpose():
    x = torch.randn(200, 333).bfloat16()
    q, scales = per_channel_cast_to_fp8(x, transpose=True)
    assert_bits((q, scales), per_token_cast_to_fp8(x.mT.contiguous()))
    assert q.is_contiguous()
    assert TOKEN.mismatch(scales, *q.shape) is None, "the layout that a product with K = T reads"


def test_the_result_is_the_same_either_way():
    x = torch.randn(200, 333).bfloat16()
    (q, scales), (q_t, scales_t) = per_channel_cast_to_fp8(x), per_channel_cast_to_fp8(x, transpose=True)
    assert_bits((q, scales), (q_t.mT, scales_t.mT))
    assert scales.stride() == (336, 1), "rows of a multiple of 16 bytes"


def test_a_vector_is_refused():
    with pytest.raises(InputError) as error:
        per_channel_cast_to_fp8(torch.ones(128))
    assert str(error.value) == "per_channel_cast_to_fp8: x is (128,); needs (..., T, N). Unsqueeze a vector."
