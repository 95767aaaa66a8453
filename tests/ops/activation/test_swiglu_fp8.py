"""swiglu_fp8(gate, up): the gate and the cast in one op, with the bits of the two."""

import pytest
import torch
from tests.ops.activation.magnitudes import problem
from tests.ops.norm.fp8_kernels import same
from transformers.activations import ACT2FN

from tilewright.errors import InputError
from tilewright.ops.activation.swiglu import swiglu
from tilewright.ops.activation.swiglu_fp8 import swiglu_fp8
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.quant.numbers import cast

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_models_gate_in_units_of_each_groups_scale(dtype):
    """The model's product, rounded to its dtype; then DeepGEMM's cast, whose division by 448 is a product on a GPU."""
    gate, up = problem((5, 384), dtype)
    groups = (ACT2FN["silu"](gate) * up).float().view(5, 3, 128)
    expected = groups.abs().amax(2).clamp(1e-4) * torch.tensor(1 / 448.0)
    q, scales = swiglu_fp8(gate, up)
    assert same(scales, expected)
    assert same(q, (groups * (1.0 / expected[..., None])).to(torch.float8_e4m3fn).view(5, 384))


def test_the_product_is_rounded_to_the_models_dtype_before_the_cast():
    """One rounding less would be more accurate, and not what the two ops give."""
    gate, up = problem((64, 256), torch.bfloat16)
    once = cast(ACT2FN["silu"](gate.float()) * up.float(), TOKEN)
    assert not same(swiglu_fp8(gate, up)[0], once[0])


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("shape", [(5, 384), (2, 3, 300), (4, 1), (1, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_two_ops_bit_for_bit(dtype, shape, ue8m0):
    gate, up = problem(shape, dtype)
    assert all(map(same, swiglu_fp8(gate, up, ue8m0=ue8m0), cast(swiglu(gate, up), TOKEN, ue8m0)))


def test_ue8m0_rounds_scales_up_to_powers_of_two():
    gate, up = problem((5, 384), torch.bfloat16)
    plain, rounded = (swiglu_fp8(gate, up, ue8m0=ue8m0)[1] for ue8m0 in (False, True))
    assert torch.equal(rounded, torch.exp2(torch.ceil(torch.log2(plain.double()))).float())


def test_scales_lie_where_the_gemm_reads_them():
    q, scales = swiglu_fp8(*problem((3, 6, 300), torch.bfloat16))
    assert q.is_contiguous()
    assert q.dtype == torch.float8_e4m3fn
    assert scales.stride() == (24, 1, 8)  # lines of 6 scales and 2 of padding, one for each of 3 groups
    assert TOKEN.mismatch(scales, 6, 300) is None


def test_a_gradient_is_refused_and_no_grad_is_enough():
    gate, up = problem((2, 128), torch.float32)
    up.requires_grad_()
    with pytest.raises(InputError, match="swiglu_fp8: a gradient is wanted"):
        swiglu_fp8(gate, up)
    with torch.no_grad():
        swiglu_fp8(gate, up)


def test_a_vector_has_no_rows_whose_scales_could_be_adjacent():
    with pytest.raises(InputError, match=r"gate is \(8,\); needs \(\.\.\., M, N\)\. Unsqueeze a vector"):
        swiglu_fp8(torch.ones(8), torch.ones(8))
