"""add_rms_norm_fp8: the addition, the norm and the cast in one kernel, with the bits of the three."""

import pytest
import torch
from tests.ops.norm.fp8_kernels import same
from tests.ops.norm.fp8_norms import check_equal, problem

from tilewright import use_backend
from tilewright.errors import InputError
from tilewright.ops.norm.add_rms_norm import add_rms_norm
from tilewright.ops.norm.add_rms_norm_fp8 import add_rms_norm_fp8
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.quant.numbers import cast
from tilewright.ops.rows import RowsBucket

DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPTIONS = [{}, {"fp32_weight": True}, {"offset": 1.0, "eps": 1e-5}, {"ue8m0": True}]
PLAIN = (1e-6, 0.0, False, False)  # eps, offset, fp32_weight, ue8m0


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(5, 384), (2, 3, 300), (4, 1), (1, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_the_steps_bit_for_bit(dtype, shape, options):
    x, residual, weight = problem(shape, dtype)
    plain = {k: v for k, v in options.items() if k != "ue8m0"}
    with use_backend("torch"):
        made = add_rms_norm_fp8(x, residual, weight, **options)
        y, total = add_rms_norm(x, residual, weight, **plain)
        steps = cast(y, TOKEN, options.get("ue8m0", False))
    assert all(map(same, made, (*steps, total)))


def test_scales_lie_where_the_gemm_reads_them():
    x, residual, weight = problem((3, 6, 300), torch.bfloat16)
    q, scales, total = add_rms_norm_fp8(x, residual, weight)
    assert q.is_contiguous()
    assert q.dtype == torch.float8_e4m3fn
    assert scales.stride() == (24, 1, 8)  # lines of 6 scales and 2 of padding, one for each of 3 groups
    assert TOKEN.mismatch(scales, 6, 300) is None
    assert torch.equal(total, x + residual)


def test_a_gradient_is_refused_and_no_grad_is_enough():
    x, residual, weight = problem((2, 128), torch.float32)
    residual.requires_grad_()
    with pytest.raises(InputError, match="add_rms_norm_fp8: a gradient is wanted"):
        add_rms_norm_fp8(x, residual, weight)
    with torch.no_grad():
        add_rms_norm_fp8(x, residual, weight)


def test_an_offset_needs_no_fp32_weight():
    x, residual, weight = problem((2, 128), torch.bfloat16)
    implied, said = (add_rms_norm_fp8(x, residual, weight, offset=1.0, fp32_weight=f) for f in (False, True))
    assert all(map(same, implied, said))


@pytest.fixture
def fused():
    from tilewright.ops.norm.kernels.triton import rms_norm_fp8 as triton

    return triton


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [384, 1000, 333, 130])
def test_every_candidate_has_the_bits_of_the_two_kernels(fused, device, n):
    x, residual, weight = problem((7, n), torch.bfloat16, device)
    bucket = RowsBucket(8, n)
    configs = {fused.configure_whole(bucket, x.dtype), *fused.candidates_whole(bucket, x.dtype)}
    for config in sorted(configs)[:: 1 if device == "cuda" else 7]:
        check_equal(x, residual, weight, PLAIN, config)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [(1e-6, 0.0, True, False), (1e-5, 1.0, True, True), (1e-6, 0.0, False, True)])
@pytest.mark.parametrize(("shape", "dtype"), [((2, 5, 272), torch.float16), ((6, 640), torch.float32)])
def test_options_batches_and_dtypes_have_the_bits_of_the_two_kernels(fused, device, shape, dtype, options):
    x, residual, weight = problem(shape, dtype, device, torch.float32)
    config = fused.configure_whole(RowsBucket(16, shape[-1]), dtype)
    check_equal(x, residual, weight, options, config)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2, 16500), (2, 2, 20000)])
def test_rows_too_long_for_registers_have_the_bits_of_the_two_kernels(fused, device, shape):
    x, residual, weight = problem(shape, torch.bfloat16, device)
    config = fused.configure_whole(RowsBucket(4, shape[-1]), x.dtype)
    check_equal(x, residual, weight, PLAIN, config)
