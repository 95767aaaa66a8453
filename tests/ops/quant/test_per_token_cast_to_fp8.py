"""per_token_cast_to_fp8: DeepGEMM's cast bit for bit, a scale for 128 elements or for a row, packed exponents."""

import pytest
import torch

from tilewright.errors import InputError
from tilewright.ops.quant.layout import ROW, TOKEN, TOKEN_UE8M0
from tilewright.ops.quant.per_token_cast_to_fp8 import per_token_cast_to_fp8

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn


def deep_gemm(x, ue8m0):
    """The cast of DeepGEMM's own tests, whose division by 448 a GPU computes as a product."""
    m, n = x.shape
    groups = torch.nn.functional.pad(x, (0, -n % 128)).view(m, -1, 128)
    scale = groups.abs().float().amax(2).clamp(1e-4) * torch.tensor(1 / 448.0)
    if ue8m0:
        scale = torch.pow(2.0, torch.ceil(torch.log2(scale.abs())))
    q = (groups * (1.0 / scale.unsqueeze(2))).to(FP8)
    return q.view(m, -1)[:, :n].contiguous(), scale


def assert_bits(actual, expected):
    assert torch.equal(actual[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_deep_gemms_cast_bit_for_bit(dtype, ue8m0):
    x = (torch.randn(40, 300) * torch.exp2(torch.randint(-12, 12, (40, 1)))).to(dtype)
    assert_bits(per_token_cast_to_fp8(x, ue8m0=ue8m0), deep_gemm(x, ue8m0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_groups_a_row_has_one_scale(dtype):
    """The recipe of vLLM's and torch's row-wise products."""
    x = (torch.randn(9, 300) * torch.exp2(torch.randint(-12, 12, (9, 1)))).to(dtype)
    scale = x.float().abs().amax(1, keepdim=True).clamp(1e-4) * torch.tensor(1 / 448.0)
    assert_bits(per_token_cast_to_fp8(x, group=None), ((x.float() * (1 / scale)).to(FP8), scale))


def test_elements_round_to_nearest_even():
    """448 makes the scale 1: between two e4m3 numbers, 16 and 18, lies 17, whose even neighbour has an even code."""
    x = torch.zeros(1, 128)
    x[0, :8] = torch.tensor([448.0, 17.0, 19.0, -17.0, 17.001, 16.999, 2.0**-10, 3 * 2.0**-10])
    q, scales = per_token_cast_to_fp8(x)
    assert scales.tolist() == [[1.0]]
    assert q[0, :8].tolist() == [448.0, 16.0, 20.0, -16.0, 18.0, 16.0, 0.0, 2.0**-8]


def test_scales_lie_where_the_products_read_them():
    x = torch.randn(5, 700).bfloat16()
    for layout, options in ((TOKEN, {}), (ROW, {"group": None}), (TOKEN_UE8M0, {"packed": True})):
        q, scales = per_token_cast_to_fp8(x, **options)
        assert layout.mismatch(scales, *q.shape) is None
    assert per_token_cast_to_fp8(x)[1].stride() == (1, 8), "scales of consecutive rows, lines of 16 bytes"


def test_packed_scales_are_the_exponents_of_powers_of_two():
    x = torch.randn(5, 700).bfloat16() * 100
    (q, words), (same_q, scales) = per_token_cast_to_fp8(x, packed=True), per_token_cast_to_fp8(x, ue8m0=True)
    assert_bits((q, words), per_token_cast_to_fp8(x, packed=True, ue8m0=True))
    assert torch.equal(q.view(torch.uint8), same_q.view(torch.uint8))
    assert (words.dtype, words.shape) == (torch.int32, (5, 2))
    for group in range(6):
        exponents = (words[:, group // 4] >> 8 * (group % 4)) & 255
        assert torch.equal(torch.exp2(exponents.float() - 127), scales[:, group])


def test_a_faulty_element_spoils_its_group_alone():
    x = torch.ones(3, 256)
    x[0, 3], x[1, 200] = torch.nan, -torch.inf
    q, scales = per_token_cast_to_fp8(x)
    assert scales[0, 0].isnan() and scales[1, 1] == torch.inf
    restored = q.float() * scales.repeat_interleave(128, 1)
    assert restored[0, :128].isnan().all() and restored[1, 128:].isnan().all()
    assert restored[0, 128:].isfinite().all() and restored[1, :128].isfinite().all() and restored[2].isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": 64}, "per_token_cast_to_fp8: group is 64; allowed are 128 and None, a scale for each row."),
        (
            {"group": None, "packed": True},
            "per_token_cast_to_fp8: packed=True with group=None; four scales along K share a word, so it needs "
            "group=128.",
        ),
    ],
)
def test_other_groups_are_refused(options, message):
    with pytest.raises(InputError) as error:
        per_token_cast_to_fp8(torch.ones(4, 128), **options)
    assert str(error.value) == message
