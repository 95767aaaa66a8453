"""quantize_weight: the scale and the rounding by hand, bounds, and what a group of zeros or a NaN becomes."""

import pytest
import torch

from tilewright.errors import InputError
from tilewright.ops.weight_only import packing
from tilewright.ops.weight_only.dequantize_weight import dequantize_weight
from tilewright.ops.weight_only.quantize_weight import quantize_weight

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (bf16, fp16, fp32)
LARGEST = {8: 127, 4: 7}


def weight(n, k, dtype=fp32, octaves=6.0):
    """Groups of magnitudes over `octaves`, so that a scale of another group is far off."""
    sizes = torch.exp2(octaves * torch.rand(n, packing.groups(k)) - octaves / 2)
    return (torch.randn(n, k) * sizes.repeat_interleave(128, 1)[:, :k]).to(dtype)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_formula_group_by_group(dtype, bits):
    """scale = amax / 127 (or 7) in bfloat16, q = round(w / scale) to the nearest even, with torch's own division."""
    w = weight(9, 300, dtype)
    q, scales = quantize_weight(w, bits=bits)
    integers = packing.unpack(q)
    for group in range(3):
        values = w[:, 128 * group : 128 * group + 128].double()
        scale = (values.abs().amax(1) / LARGEST[bits]).float().to(bf16)
        # A quotient by a constant and a product by its float32 inverse may round to neighbouring bfloat16 numbers
        assert ((scales[:, group].view(torch.int16) - scale.view(torch.int16)).abs() <= 1).all()
        ratio = values / scales[:, group, None].double()
        halfway = ((ratio - ratio.floor()) - 0.5).abs() < 1e-4
        actual = integers[:, 128 * group : 128 * group + 128]
        assert torch.equal(actual[~halfway], ratio.round().to(torch.int8)[~halfway])


def test_a_group_by_hand():
    w = torch.zeros(1, 256)
    w[0, :4] = torch.tensor([127.0, -127.0, 63.5, 1.0])
    w[0, 128:131] = torch.tensor([14.0, -3.0, 5.0])
    q, scales = quantize_weight(w)
    assert scales.tolist() == [[1.0, 0.1103515625]], "14 / 127 in bfloat16"
    assert q[0, :4].tolist() == [127, -127, 64, 1], "63.5 goes to the even integer"
    assert q[0, 128:131].tolist() == [127, -27, 45]
    q, scales = quantize_weight(w[:, 128:], bits=4)
    assert scales.tolist() == [[2.0]]
    assert packing.unpack(q)[0, :4].tolist() == [7, -2, 2, 0], "-1.5 and 2.5 go to the even integer"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("k", [2, 128, 200, 384])
def test_nothing_is_further_than_half_a_scale(bits, k, dtype):
    w = weight(33, k, dtype)
    q, scales = quantize_weight(w, bits=bits)
    assert scales.dtype == bf16
    integers = packing.unpack(q)
    assert integers.abs().max() == LARGEST[bits]
    spread = scales.double().repeat_interleave(128, 1)[:, :k]
    assert ((w.double() - integers.double() * spread).abs() <= 0.5001 * spread).all()
    assert (dequantize_weight(q, scales, dtype=fp32).double() == integers.double() * spread).all(), "exact in float32"


@pytest.mark.parametrize("bits", [8, 4])
def test_half_the_largest_numbers_round_up_to_a_whole_scale(bits):
    """bfloat16 rounds these scales down the most it can: nothing leaves the integers' range."""
    amax = torch.linspace(1, 2, 4001)
    w = torch.zeros(4001, 128)
    w[:, 0], w[:, 1] = amax, -amax
    integers = packing.unpack(quantize_weight(w, bits=bits)[0])
    assert (integers[:, 0] == LARGEST[bits]).all()
    assert (integers[:, 1] == -LARGEST[bits]).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_have_no_scale_and_stay_zeros(bits):
    w = weight(3, 384)
    w[1, 128:256] = 0
    w[2, 256:] = 1e-38
    q, scales = quantize_weight(w, bits=bits)
    assert scales[1, 1] == scales[2, 2] == 0
    made = dequantize_weight(q, scales, dtype=fp32)
    assert (made[1, 128:256] == 0).all()
    assert (made[2, 256:] == 0).all()
    assert made.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_group_with_a_nan_or_infinity_is_nan_and_its_neighbours_are_not(bad):
    w = weight(2, 384)
    w[0, 130] = bad
    made = dequantize_weight(*quantize_weight(w), dtype=fp32)
    assert made[0, 128:256].isnan().all()
    assert made[0, :128].isfinite().all()
    assert made[0, 256:].isfinite().all()
    assert made[1].isfinite().all()


@pytest.mark.parametrize("n", [1, 7, 8, 40])
def test_scales_of_consecutive_rows_lie_side_by_side(n):
    _, scales = quantize_weight(weight(n, 300))
    assert scales.shape == (n, 3)
    assert scales.stride(0) == 1
    assert scales.stride(1) % 8 == 0, "lines of 16 bytes"
    assert packing.in_layout(scales)
    assert n == 1 or not packing.in_layout(scales.contiguous())


def test_the_weights_dtype_does_not_matter_where_its_numbers_are_the_same():
    w = weight(5, 256, bf16, octaves=2.0)
    for bits in (8, 4):
        first = quantize_weight(w, bits=bits)
        for dtype in (fp32, torch.float64):
            q, scales = quantize_weight(w.to(dtype), bits=bits)
            assert torch.equal(q, first[0])
            assert torch.equal(scales.float(), first[1].float())


@pytest.mark.parametrize(
    ("w", "options", "message"),
    [
        (torch.ones(4, 128), {"group": 64}, "quantize_weight: group is 64; kernels know groups of 128 alone."),
        (torch.ones(4, 128), {"bits": 2}, "quantize_weight: bits is 2; allowed are 8 and 4."),
        (
            torch.ones(4, 7),
            {"bits": 4},
            "quantize_weight: K is 7; two elements share a byte at 4 bits, K must be even.",
        ),
        (
            torch.ones(4, 8, requires_grad=True),
            {},
            "quantize_weight: w requires a gradient, and rounding has none. Use w.detach().",
        ),
    ],
)
def test_what_is_refused(w, options, message):
    with pytest.raises(InputError) as error:
        quantize_weight(w, **options)
    assert str(error.value) == message
