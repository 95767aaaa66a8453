"""dequantize_weight: integer times the scale of its group, which byte holds which element, one rounding."""

import pytest
import torch

from tilewright.errors import InputError
from tilewright.ops.weight_only.dequantize_weight import dequantize_weight

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (bf16, fp16, fp32)
N, K = 5, 300


def packed_weight(bits):
    """q of random bytes, and the integers they hold, element by element."""
    if bits == 8:
        q = torch.randint(-128, 128, (N, K), dtype=torch.int8)
        return q, q.tolist()
    q = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8)
    signed = [v - 16 if v > 7 else v for v in range(16)]
    return q, [[signed[byte >> shift & 15] for byte in row for shift in (0, 4)] for row in q.tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_each_element_times_the_scale_of_its_group(bits, scale_dtype, dtype):
    """The product is exact in float64; it is rounded to float32, and from there to dtype."""
    q, integers = packed_weight(bits)
    scales = (torch.rand(N, 3) + 0.5).to(scale_dtype)
    exact = torch.tensor(integers, dtype=torch.float64) * scales.double()[:, torch.arange(K) // 128]
    assert torch.equal(dequantize_weight(q, scales, dtype=dtype), exact.float().to(dtype))


@pytest.mark.parametrize("bits", [8, 4])
def test_q_and_scales_have_any_strides(bits):
    q, _ = packed_weight(bits)
    scales = torch.rand(N, 3).to(bf16)
    expected = dequantize_weight(q, scales)
    assert expected.is_contiguous()
    assert torch.equal(dequantize_weight(q.mT.contiguous().mT, scales.mT.contiguous().mT), expected)


def test_int8_from_elsewhere_may_hold_its_least_number():
    q = torch.full((2, 128), -128, dtype=torch.int8)
    made = dequantize_weight(q, torch.full((2, 1), 0.5, dtype=fp16), dtype=fp16)
    assert (made == -64).all()


@pytest.mark.parametrize(
    ("q", "scales", "options", "message"),
    [
        (
            torch.ones(4, 200),
            torch.ones(4, 2),
            {},
            "dequantize_weight: q is torch.float32; needs int8, or uint8 of two 4-bit elements. quantize_weight makes "
            "both.",
        ),
        (
            torch.ones(4, 100, dtype=torch.uint8),
            torch.ones(4, 1),
            {},
            "dequantize_weight: scales is (4, 1); needs (4, 2) for q (4, 100) of 4 bits, K=200: one for each 128 "
            "elements of a row.",
        ),
        (
            torch.ones(4, 8, dtype=torch.int8),
            torch.ones(4, 1),
            {"dtype": torch.float64},
            "dequantize_weight: dtype is torch.float64; allowed are bfloat16, float16 and float32.",
        ),
    ],
)
def test_what_is_refused(q, scales, options, message):
    with pytest.raises(InputError) as error:
        dequantize_weight(q, scales, **options)
    assert str(error.value) == message
