"""The Triton kernel of swiglu_fp8 and silu_and_mul_fp8 has the bits of the gate's kernel and the cast.

That is tested in the interpreter and on a GPU, in every configuration: the gate is elementwise, so a configuration
divides the work and nothing else.  Outputs lie in larger, poisoned memory, which must stay as it was.
"""

import pytest
import torch
from tests.ops.activation.magnitudes import problem
from tests.ops.norm.fp8_kernels import outputs, same

from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.quant.numbers import cast
from tilewright.ops.rows import RowsBucket, rows_bucket

DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture
def kernels():
    from tilewright.ops.activation.kernels.triton import gated, silu_fp8

    return gated, silu_fp8


def check_equal(kernels, gate, up, ue8m0, config):
    """Split and packed form against the plain kernel and the cast."""
    plain, fused = kernels
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    plain.split(y, gate, up, "silu", plain.configure(rows_bucket(gate), gate.dtype))
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
    configs = sorted({*fused.SIZES, *fused.candidates(RowsBucket(32, n), gate.dtype)})
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
    bucket = RowsBucket(1 << (m - 1).bit_length(), n)
    assert kernels[1].configure(bucket, torch.bfloat16).rows <= bucket.M
