"""dequantize: the element's own scale for every granularity, one rounding, scales of any strides."""

import pytest
import torch

from tilewright.errors import InputError
from tilewright.ops.quant.dequantize import dequantize
from tilewright.ops.quant.per_tensor_cast_to_fp8 import per_tensor_cast_to_fp8
from tilewright.ops.quant.per_token_cast_to_fp8 import per_token_cast_to_fp8

FP8 = torch.float8_e4m3fn
M, K = 200, 333

# Shape of the scales, and the index of the scale of element (i, j)
GRANULARITIES = {
    "128 of a row": ((M, 3), lambda i, j: (i, j // 128)),
    "a block": ((2, 3), lambda i, j: (i // 128, j // 128)),
    "128 of a column": ((2, K), lambda i, j: (i // 128, j)),
    "a row": ((M, 1), lambda i, j: (i, 0 * j)),
    "a matrix": ((1, 1), lambda i, j: (0 * i, 0 * j)),
}


def codes(*shape):
    """Every e4m3 number, without NaN."""
    drawn = torch.randint(0, 127, shape) + 128 * torch.randint(0, 2, shape)
    return drawn.to(torch.uint8).view(FP8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", GRANULARITIES)
def test_the_shape_of_the_scales_says_which_one_an_element_has(name, dtype):
    """The product of e4m3 and float32 is exact in float64; rounded to float32, and from there to dtype."""
    shape, index = GRANULARITIES[name]
    q, scales = codes(M, K), torch.exp2(torch.rand(shape) * 8 - 4)
    rows, columns = torch.meshgrid(torch.arange(M), torch.arange(K), indexing="ij")
    exact = q.double() * scales.double()[index(rows, columns)]
    assert torch.equal(dequantize(q, scales, dtype=dtype), exact.float().to(dtype))


def test_packed_exponents_are_unpacked():
    q = codes(2, 600)
    words = torch.tensor([[127 | 128 << 8 | 126 << 16 | 130 << 24, 137], [127] * 2], dtype=torch.int64).int()
    words[1, 0] = 255  # the first group of row 1 has NaN for a scale; the exponents of the others are 0
    restored = dequantize(q, words, dtype=torch.float32)
    scales = torch.tensor([1.0, 2.0, 0.5, 8.0, 1024.0]).repeat_interleave(128)[:600]
    assert torch.equal(restored[0], q[0].float() * scales)
    assert restored[1, :128].isnan().all()
    assert torch.equal(restored[1, 512:], q[1, 512:].float())


def test_packed_scales_of_a_cast_are_its_powers_of_two():
    x = torch.randn(M, K).bfloat16()
    q, words = per_token_cast_to_fp8(x, packed=True)
    same_q, scales = per_token_cast_to_fp8(x, ue8m0=True)
    assert torch.equal(dequantize(q, words), dequantize(same_q, scales))


def test_scales_have_any_strides_and_one_may_serve_a_batch():
    x = torch.randn(3, 130, 140)
    q, scales = per_token_cast_to_fp8(x)
    assert torch.equal(dequantize(q, scales.contiguous()), dequantize(q, scales))
    q, scale = per_tensor_cast_to_fp8(x)
    assert torch.equal(dequantize(q, scale), dequantize(q, scale.expand(3, 1, 1)))


def test_what_float16_cannot_hold_is_infinite():
    q = torch.full((1, 2), 448.0).to(FP8)
    assert dequantize(q, torch.full((1, 1), 200.0), dtype=torch.float16).tolist() == [[torch.inf, torch.inf]]


def test_out_is_written():
    q, scales = codes(M, K), torch.rand(M, 3)
    out = torch.full((M, K), torch.nan, dtype=torch.bfloat16)
    assert dequantize(q, scales, out=out) is out
    assert torch.equal(out, dequantize(q, scales))


def test_scales_of_another_shape_are_refused_with_the_shapes_that_fit():
    with pytest.raises(InputError) as error:
        dequantize(codes(2, 4, 256), torch.ones(2, 4, 3))
    assert str(error.value) == (
        "dequantize: scales are (2, 4, 3) torch.float32; those of q (2, 4, 256) are one of (1, 1), (4, 1), (4, 2), "
        "(1, 2), (1, 256), after the batch (2,)."
    )


def test_the_gradient_of_scales_is_refused():
    with pytest.raises(InputError, match="8-bit numbers have none"):
        dequantize(codes(4, 128), torch.ones(4, 1, requires_grad=True))
