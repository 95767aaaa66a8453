"""silu_and_mul_fp8(x): the packed gate and the cast in one op, with the bits of the two; the gate is the first half."""

import pytest
import torch
from tests.ops.activation.magnitudes import problem
from tests.ops.norm.fp8_kernels import same
from transformers.activations import ACT2FN

from tilewright.errors import InputError
from tilewright.ops.activation.silu_and_mul import silu_and_mul
from tilewright.ops.activation.silu_and_mul_fp8 import silu_and_mul_fp8
from tilewright.ops.activation.swiglu_fp8 import swiglu_fp8
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.quant.numbers import cast

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def packed(shape, dtype):
    return torch.cat(problem(shape, dtype), -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_phi3s_gate_in_units_of_each_groups_scale(dtype):
    """The model's product, rounded to its dtype; then DeepGEMM's cast, whose division by 448 is a product on a GPU."""
    x = packed((5, 384), dtype)
    gate, up = x.chunk(2, dim=-1)
    groups = (up * ACT2FN["silu"](gate)).float().view(5, 3, 128)
    expected = groups.abs().amax(2).clamp(1e-4) * torch.tensor(1 / 448.0)
    q, scales = silu_and_mul_fp8(x)
    assert same(scales, expected)
    assert same(q, (groups * (1.0 / expected[..., None])).to(torch.float8_e4m3fn).view(5, 384))


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("shape", [(5, 384), (2, 3, 300), (4, 1), (1, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_two_ops_bit_for_bit(dtype, shape, ue8m0):
    x = packed(shape, dtype)
    assert all(map(same, silu_and_mul_fp8(x, ue8m0=ue8m0), cast(silu_and_mul(x), TOKEN, ue8m0)))


@pytest.mark.parametrize("ue8m0", [False, True])
def test_packed_and_split_are_one_function(ue8m0):
    gate, up = problem((2, 3, 300), torch.bfloat16)
    x = torch.cat((gate, up), -1)
    assert all(map(same, silu_and_mul_fp8(x, ue8m0=ue8m0), swiglu_fp8(gate, up, ue8m0=ue8m0)))


def test_scales_count_groups_of_the_result():
    q, scales = silu_and_mul_fp8(packed((3, 6, 300), torch.bfloat16))
    assert q.shape == (3, 6, 300)
    assert q.is_contiguous()
    assert scales.stride() == (24, 1, 8)  # lines of 6 scales and 2 of padding, one for each of 3 groups
    assert TOKEN.mismatch(scales, 6, 300) is None


def test_a_gradient_is_refused_and_no_grad_is_enough():
    x = packed((2, 128), torch.float32).requires_grad_()
    with pytest.raises(InputError, match="silu_and_mul_fp8: a gradient is wanted"):
        silu_and_mul_fp8(x)
    with torch.no_grad():
        silu_and_mul_fp8(x)


def test_an_odd_width_is_refused_with_its_shape():
    with pytest.raises(InputError, match=r"silu_and_mul_fp8: x is \(2, 5\); needs an even last dimension"):
        silu_and_mul_fp8(torch.ones(2, 5))
