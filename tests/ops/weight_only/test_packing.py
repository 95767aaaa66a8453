"""Quantised weights: the format bit by bit, the rounding, and what a group of zeros or a NaN becomes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


def test_the_low_four_bits_are_the_even_element():
    packed = packing.pack(torch.tensor([[1, -2, 7, -8]], dtype=torch.int8))
    assert packed.tolist() == [[0xE1, 0x87]]
    assert packing.unpack(packed).tolist() == [[1, -2, 7, -8]]


def test_every_pair_of_elements_survives_packing():
    pairs = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).to(torch.int8)
    assert torch.equal(packing.unpack(packing.pack(pairs)), pairs)


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


def test_rounding_to_bfloat16_is_that_of_a_cast():
    kept = torch.arange(0, 1 << 16, 7) << 16
    cut = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])  # below, at and above ties to even and odd
    x = (kept[:, None] | cut).to(torch.int32).view(fp32)
    made, wanted = packing.to_bfloat16(x), x.to(bf16).float()
    assert torch.equal(made.isnan(), wanted.isnan())
    numbers = ~wanted.isnan()
    assert torch.equal(made[numbers].view(torch.int32), wanted[numbers].view(torch.int32)), "the signs of zeros too"


class KeptWide(TorchDispatchMode):
    """What fused operations are to a compiler that does not round what it holds in registers: bfloat16 is float32."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == bf16:
            kwargs["dtype"] = fp32
        return func(*args, **kwargs)


@pytest.mark.parametrize("bits", [8, 4])
def test_integers_belong_to_the_stored_scales_where_a_compiler_keeps_float32(bits):
    w = weight(37, 384, bf16)
    wanted, wanted_scales = packing.quantise(w, bits)
    with KeptWide():
        q, scales = packing.quantise(w, bits)
    assert torch.equal(q, wanted)
    assert torch.equal(scales, wanted_scales)


def test_the_weights_dtype_does_not_matter_where_its_numbers_are_the_same():
    w = weight(5, 256, bf16, octaves=2.0)
    for bits in (8, 4):
        first = quantize_weight(w, bits=bits)
        for dtype in (fp32, torch.float64):
            q, scales = quantize_weight(w.to(dtype), bits=bits)
            assert torch.equal(q, first[0])
            assert torch.equal(scales.float(), first[1].float())


def test_int8_from_elsewhere_may_hold_its_least_number():
    q = torch.full((2, 128), -128, dtype=torch.int8)
    made = dequantize_weight(q, torch.full((2, 1), 0.5, dtype=fp16), dtype=fp16)
    assert (made == -64).all()
