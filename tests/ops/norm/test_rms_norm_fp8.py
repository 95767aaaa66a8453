"""rms_norm_fp8: the norm and the cast in one kernel, with the bits of the two.

The reference is the two steps.  Of the kernels that is tested, in the interpreter and on a GPU: what the plain kernel
writes in a configuration and what the cast makes of it, the fused kernel writes in that configuration.  Outputs lie
in larger, poisoned memory, which must stay as it was.
"""

import pytest
import torch
from tests.ops.norm.fp8_kernels import outputs, same
from tests.ops.norm.fp8_norms import check_equal, problem

from tilewright import use_backend
from tilewright.errors import InputError
from tilewright.ops.norm.rms_norm import rms_norm
from tilewright.ops.norm.rms_norm_fp8 import RmsNormFp8Args, rms_norm_fp8
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
def test_the_reference_is_the_two_steps_bit_for_bit(dtype, shape, options):
    x, _, weight = problem(shape, dtype)
    plain = {k: v for k, v in options.items() if k != "ue8m0"}
    with use_backend("torch"):
        made = rms_norm_fp8(x, weight, **options)
        steps = cast(rms_norm(x, weight, **plain), TOKEN, options.get("ue8m0", False))
    assert all(map(same, made, steps))


def test_a_promoted_norm_is_rounded_to_the_dtype_of_x():
    x, _, weight = problem((6, 256), torch.bfloat16, weight_dtype=torch.float32)
    wide = rms_norm(x, weight)
    assert wide.dtype == torch.float32
    made = rms_norm_fp8(x, weight)
    assert all(map(same, made, cast(wide.bfloat16(), TOKEN)))
    assert not all(map(same, made, cast(wide, TOKEN))), "the sample cannot tell the two apart"


def test_scales_lie_where_the_gemm_reads_them():
    x, _, weight = problem((3, 6, 300), torch.bfloat16)
    q, scales = rms_norm_fp8(x, weight)
    assert q.is_contiguous()
    assert q.dtype == torch.float8_e4m3fn
    assert scales.stride() == (24, 1, 8)  # lines of 6 scales and 2 of padding, one for each of 3 groups
    assert TOKEN.mismatch(scales, 6, 300) is None


def test_ue8m0_scales_are_powers_of_two_that_nothing_exceeds():
    x, _, weight = problem((16, 512), torch.bfloat16)
    q, scales = rms_norm_fp8(x, weight, ue8m0=True)
    mantissa, _ = torch.frexp(scales)
    assert (mantissa == 0.5).all()
    assert (scales >= rms_norm_fp8(x, weight)[1]).all()
    assert q.float().abs().max() <= 448


def test_a_gradient_is_refused_and_no_grad_is_enough():
    x, _, weight = problem((2, 128), torch.float32)
    weight.requires_grad_()
    with pytest.raises(InputError, match="rms_norm_fp8: a gradient is wanted"):
        rms_norm_fp8(x, weight)
    with torch.no_grad():
        rms_norm_fp8(x, weight)


@pytest.fixture
def fused():
    from tilewright.ops.norm.kernels.triton import rms_norm_fp8 as triton

    return triton


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [384, 1000, 333, 130])
def test_every_candidate_has_the_bits_of_the_two_kernels(fused, device, n):
    x, _, weight = problem((7, n), torch.bfloat16, device)
    configs = {fused.configure(RowsBucket(8, n), x.dtype), *fused.candidates(RowsBucket(8, n), x.dtype)}
    for config in sorted(configs)[:: 1 if device == "cuda" else 7]:
        check_equal(x, None, weight, PLAIN, config)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [(1e-6, 0.0, True, False), (1e-5, 1.0, True, True), (1e-6, 0.0, False, True)])
@pytest.mark.parametrize(("shape", "dtype"), [((2, 5, 272), torch.float16), ((6, 640), torch.float32)])
def test_options_batches_and_dtypes_have_the_bits_of_the_two_kernels(fused, device, shape, dtype, options):
    x, _, weight = problem(shape, dtype, device, torch.float32)
    config = fused.configure(RowsBucket(16, shape[-1]), dtype)
    check_equal(x, None, weight, options, config)


def exact_sums(shape, dtype, device):
    """Values whose squares add up without rounding, in whatever order."""
    spans = torch.exp2(torch.randint(-2, 3, (shape[-1] // 128,))).repeat_interleave(128)
    x = torch.randint(-7, 8, shape) * spans
    return x.to(device, dtype), torch.randn(shape[-1]).to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [(1e-6, 0.0, False, False), (1e-5, 1.0, True, True)])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 1536), torch.bfloat16), ((2, 3, 3584), torch.float16), ((3, 512), torch.bfloat16)]
)
def test_parts_of_rows_have_the_bits_of_the_two_kernels(fused, device, shape, dtype, options):
    x, weight = exact_sums(shape, dtype, device)
    configs = [config for config in fused.candidates(RowsBucket(8, shape[-1]), dtype) if config.columns]
    assert configs
    for config in configs:
        check_equal(x, None, weight, options, config)
        check_equal(x, None, weight.float(), options, config)


@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_rows_with_nan_or_infinity_say_so(fused, device):
    x, weight = exact_sums((4, 1536), torch.bfloat16, device)
    x[1, 5], x[2, 1535] = torch.nan, torch.inf
    q, scales, _ = outputs(x.shape, device)
    fused.launch((q, scales), RmsNormFp8Args(x, weight, *PLAIN), fused.Config(1, 1, 512))
    wrong = torch.isnan(q.float() * scales.repeat_interleave(128, -1))
    assert wrong[1].all()
    assert wrong[2, 1535]
    assert not wrong[0].any()
    assert not wrong[3].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2, 16500), (2, 2, 20000)])
def test_rows_too_long_for_registers_have_the_bits_of_the_two_kernels(fused, device, shape):
    x, _, weight = problem(shape, torch.bfloat16, device)
    config = fused.configure(RowsBucket(4, shape[-1]), x.dtype)
    check_equal(x, None, weight, PLAIN, config)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_apart_in_memory_are_read_where_they_are(fused, device):
    around = torch.full((6, 400), torch.nan, dtype=torch.bfloat16, device=device)
    x = around[:, 7:263].normal_()
    _, _, weight = problem((6, 256), x.dtype, device)
    check_equal(x, None, weight, PLAIN, fused.configure(RowsBucket(8, 256), x.dtype))
    # Parts of another length, which a symbolic size may have chosen, do not divide these rows
    check_equal(x, None, weight, PLAIN, fused.Config(1, 4, 1024))


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_with_nan_or_infinity_says_so_and_spoils_no_other(fused, device):
    x, _, weight = problem((4, 300), torch.bfloat16, device)
    x[1, 5], x[2, 299] = torch.nan, torch.inf
    q, scales, _ = outputs(x.shape, device)
    fused.launch((q, scales), RmsNormFp8Args(x, weight, *PLAIN), fused.Config(2, 4))
    wrong = torch.isnan(q.float() * scales.repeat_interleave(128, -1)[:, :300])
    assert wrong[1].all()
    assert wrong[2, 299]
    assert not wrong[0].any()
    assert not wrong[3].any()
