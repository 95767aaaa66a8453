"""Casts to MXFP8, MXFP4 and NVFP4: elements by search, scales by the OCP rule, what is no number, the kernels' bits."""

import math
from fractions import Fraction

import pytest
import torch
from tests.ops.quant.microscale_parts import E2M1, nearest, spread_values

from tilewright import ops
from tilewright.errors import InputError
from tilewright.ops.quant import microscale

bf16, fp32 = torch.bfloat16, torch.float32
FORMATS = tuple(microscale.FORMATS)
E4M3 = tuple(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist())


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_scales_are_those_of_the_specification(name):
    x = spread_values(9, 96)
    q, scales = ops.cast_to_blocks(x, format=name)
    emax, numbers = {"mxfp4": (2, E2M1), "mxfp8": (8, E4M3)}[name]
    elements = microscale.unpack(q) if name == "mxfp4" else q.float()
    for row in range(9):
        for block in range(3):
            values = x[row, 32 * block : 32 * block + 32].tolist()
            amax = max(map(abs, values))
            exponent = max(math.floor(math.log2(amax)) - emax, -127) if amax else -127
            assert scales[row, block] == exponent + 127
            scaled = [Fraction(v) / Fraction(2) ** exponent for v in values]
            wanted = [math.copysign(numbers[nearest(s, numbers)], v) for s, v in zip(scaled, values, strict=True)]
            assert elements[row, 32 * block : 32 * block + 32].tolist() == wanted


def test_nvfp4_has_two_scales():
    x = spread_values(6, 64)
    q, scales, whole = ops.cast_to_blocks(x, format="nvfp4")
    torch.testing.assert_close(whole, x.abs().amax().reshape(1) / 2688)
    amax = x.unflatten(-1, (4, 16)).abs().amax(-1)
    torch.testing.assert_close(scales.float(), amax / 6 / whole, rtol=1 / 16, atol=2**-10)
    restored = ops.dequantize_blocks(q, scales, whole, dtype=fp32).unflatten(-1, (4, 16))
    step = scales.float() * whole  # numbers up to 6 are 2 apart at most, and a scale is rounded by a sixteenth
    assert ((restored - x.unflatten(-1, (4, 16))).abs() <= step[..., None] * 1.5 + 2**-10 * whole * 6).all()


@pytest.mark.parametrize("name", FORMATS)
def test_a_block_with_a_nan_is_nan_and_no_other(name):
    x = torch.randn(3, 128)
    x[1, 40], x[2, 127] = torch.nan, -torch.inf
    block = microscale.FORMATS[name].block
    whole = torch.ones(1) / 400 if name == "nvfp4" else None
    made = ops.dequantize_blocks(*ops.cast_to_blocks(x, format=name, tensor_scale=whole), dtype=fp32)
    wanted = torch.zeros(3, 128, dtype=torch.bool)
    wanted[1, 40 // block * block : (40 // block + 1) * block] = wanted[2, 128 - block :] = True
    assert torch.equal(made.isnan(), wanted)


def test_a_gradient_is_refused():
    with pytest.raises(InputError, match="gradient"):
        ops.cast_to_blocks(torch.randn(2, 32, requires_grad=True))


@pytest.mark.interp
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [bf16, torch.float16, fp32])
def test_the_kernels_make_the_bits_of_the_reference(name, dtype):
    x = spread_values(9, 96).to(dtype)
    x[3, 3], x[4, 40] = torch.nan, torch.inf
    whole = torch.full((1,), 0.003) if name == "nvfp4" else None
    made, wanted = (ops.cast_to_blocks(x, format=name, tensor_scale=whole, backend=b) for b in ("triton", "torch"))
    for a, b in zip(made, wanted, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    restored, reference = (ops.dequantize_blocks(*made, dtype=dtype, backend=b) for b in ("triton", "torch"))
    assert torch.equal(restored.nan_to_num(-1), reference.nan_to_num(-1))
