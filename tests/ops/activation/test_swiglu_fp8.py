"""swiglu_fp8 and silu_and_mul_fp8: the gate and the cast in one kernel, with the bits of the two.

Of the kernels that is tested in the interpreter and on a GPU, in every configuration: the gate is elementwise, so a
configuration divides the work and nothing else.  Outputs lie in larger, poisoned memory, which must stay as it was.
"""

import pytest
import torch
from tests.ops.norm.fp8_kernels import outputs, same

from tilewright.errors import InputError
from tilewright.ops.activation.silu_and_mul import silu_and_mul
from tilewright.ops.activation.silu_and_mul_fp8 import silu_and_mul_fp8
from tilewright.ops.activation.swiglu import swiglu
from tilewright.ops.activation.swiglu_fp8 import swiglu_fp8
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.quant.numbers import cast

DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def problem(shape, dtype, device="cpu"):
    """Blocks of columns of very different size, so that every group has a scale of its own."""
    spans = torch.exp2(torch.randint(-6, 7, (-(-shape[-1] // 128),))).repeat_interleave(128)[: shape[-1]]
    return torch.randn(shape).to(device, dtype), (torch.randn(shape) * spans).to(device, dtype)


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("shape", [(5, 384), (2, 3, 300), (4, 1), (1, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_the_two_steps_bit_for_bit(dtype, shape, ue8m0):
    gate, up = problem(shape, dtype)
    x = torch.cat((gate, up), -1)
    steps = cast(swiglu(gate, up), TOKEN, ue8m0)
    assert all(map(same, swiglu_fp8(gate, up, ue8m0=ue8m0), steps))
    assert all(map(same, silu_and_mul_fp8(x, ue8m0=ue8m0), steps))
    assert all(map(same, cast(silu_and_mul(x), TOKEN, ue8m0), steps))


def test_scales_lie_where_the_gemm_reads_them():
    gate, up = problem((3, 6, 300), torch.bfloat16)
    for q, scales in (swiglu_fp8(gate, up), silu_and_mul_fp8(torch.cat((gate, up), -1))):
        assert q.is_contiguous()
        assert q.dtype == torch.float8_e4m3fn
        assert scales.stride() == (24, 1, 8)  # lines of 6 scales and 2 of padding, one for each of 3 groups
        assert TOKEN.mismatch(scales, 6, 300) is None


def test_a_gradient_is_refused_and_no_grad_is_enough():
    gate, up = problem((2, 128), torch.float32)
    up.requires_grad_()
    with pytest.raises(InputError, match="swiglu_fp8: a gradient is wanted"):
        swiglu_fp8(gate, up)
    with pytest.raises(InputError, match="silu_and_mul_fp8: a gradient is wanted"):
        silu_and_mul_fp8(torch.cat((gate, up), -1))
    with torch.no_grad():
        swiglu_fp8(gate, up)


@pytest.fixture
def kernels():
    from tilewright.ops.activation.gated import triton as plain
    from tilewright.ops.activation.swiglu_fp8 import triton as fused

    return plain, fused


def check_equal(kernels, gate, up, ue8m0, config):
    """Split and packed form against the plain kernel and the cast."""
    plain, fused = kernels
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    plain.split(y, gate, up, "silu", plain.configure((gate.numel() // gate.shape[-1], gate.shape[-1]), gate.dtype))
    expected = cast(y, TOKEN, ue8m0)
    q, scales, intact = outputs(gate.shape, gate.device)
    fused.split(q, scales, gate, up, ue8m0, config)
    assert intact(), config
    assert all(map(same, (q, scales), expected)), config
    q, scales, intact = outputs(gate.shape, gate.device)
    fused.packed(q, scales, torch.cat((gate, up), -1), ue8m0, config)
    assert intact(), config
    assert all(map(same, (q, scales), expected)), config


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [640, 333, 272])
def test_every_candidate_has_the_bits_of_the_two_kernels(kernels, device, n):
    _, fused = kernels
    gate, up = problem((19, n), torch.bfloat16, device)
    configs = sorted({*fused.SIZES, *fused.candidates((32, n), gate.dtype)})
    for config in configs[:: 1 if device == "cuda" else 11]:
        check_equal(kernels, gate, up, False, config)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_and_powers_of_two_have_the_bits_of_the_two_kernels(kernels, device, dtype):
    gate, up = problem((3, 5, 300), dtype, device)
    check_equal(kernels, gate, up, True, kernels[1].Config(8, 2, 4))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_apart_in_memory_are_read_where_they_are(kernels, device):
    gate, up = (torch.full((6, width), torch.nan, device=device).bfloat16()[:, 7:263].normal_() for width in (330, 390))
    check_equal(kernels, gate, up, False, kernels[1].Config(4, 2, 2))


@pytest.mark.parametrize("device", DEVICES)
def test_nan_and_infinity_stay_in_their_groups(kernels, device):
    gate, up = problem((4, 300), torch.bfloat16, device)
    up[1, 5], gate[2, 299] = torch.nan, torch.inf
    q, scales, _ = outputs(gate.shape, device)
    kernels[1].split(q, scales, gate, up, False, kernels[1].Config(4, 2, 2))
    wrong = torch.isnan(q.float() * scales.repeat_interleave(128, -1)[:, :300])
    expected = torch.zeros_like(wrong)
    expected[1, :128] = expected[2, 256:] = True
    assert torch.equal(wrong, expected)


@pytest.mark.parametrize("m", [1, 2, 7, 64, 8192])
@pytest.mark.parametrize("n", [1, 128, 4096, 14336])
def test_no_program_has_more_rows_than_there_are(kernels, m, n):
    bucket = 1 << (m - 1).bit_length(), n
    assert kernels[1].configure(bucket, torch.bfloat16).rows <= bucket[0]
