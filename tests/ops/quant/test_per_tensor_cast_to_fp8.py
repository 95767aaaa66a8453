"""per_tensor_cast_to_fp8: one scale whatever the shape, and what its second read costs."""

import pytest
import torch

from tilewright.dispatch import Sample
from tilewright.errors import InputError
from tilewright.hardware import device_info
from tilewright.ops.quant.per_tensor_cast_to_fp8 import CONTRACT, per_tensor_cast_to_fp8

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("shape", [(3, 10, 20), (1, 1), (200, 300)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_largest_magnitude_of_all_becomes_448(dtype, shape):
    """The formula on the flattened tensor."""
    x = (torch.randn(shape) * 100).to(dtype)
    q, scale = per_tensor_cast_to_fp8(x)
    expected = x.float().abs().max().clamp(1e-4) * torch.tensor(1 / 448.0)
    assert (scale.shape, scale.dtype) == ((1, 1), torch.float32)
    assert scale.item() == expected.item()
    assert torch.equal(q.view(torch.uint8), (x.float() * (1 / expected)).to(FP8).view(torch.uint8))
    assert q.float().abs().max() == 448


def test_zeros_have_the_scale_of_the_floor():
    q, scale = per_tensor_cast_to_fp8(torch.zeros(3, 5))
    assert scale.item() == (torch.tensor(1e-4) * torch.tensor(1 / 448.0)).item()
    assert (q.float() == 0).all()


@pytest.mark.parametrize(("fault", "scale"), [(torch.nan, torch.nan), (-torch.inf, torch.inf)])
def test_a_faulty_element_becomes_the_scale_of_all(fault, scale):
    x = torch.ones(2, 3, 5)
    x[1, 2, 4] = fault
    q, actual = per_tensor_cast_to_fp8(x)
    torch.testing.assert_close(actual, torch.full((1, 1), scale), equal_nan=True)
    assert (q.float() * actual).isnan().all()


def test_rows_with_gaps_have_the_scale_of_their_own_elements():
    wide = torch.full((6, 40), torch.inf)
    x = wide[1:5, 3:30].normal_()
    q, scale = per_tensor_cast_to_fp8(x)
    assert q.is_contiguous()
    assert scale.item() == (x.abs().max() * torch.tensor(1 / 448.0)).item()


def test_the_second_read_costs_what_the_chip_cannot_hold():
    def read(m, n):
        return CONTRACT.cost(Sample((torch.empty(m, n, dtype=torch.bfloat16, device="meta"),)), "fwd").bytes_read

    info = device_info("meta")
    held = info.l2_bytes + (info.sm_count * (484 << 10) if info.arch.startswith("sm_") else 0)
    assert info.l2_bytes > 0
    assert read(1, 4096) == 2 * 4096
    rows = held // 4096  # twice what it holds
    assert read(rows, 4096) == 2 * (2 * 4096 * rows) - held


def test_integers_are_refused():
    with pytest.raises(InputError) as error:
        per_tensor_cast_to_fp8(torch.ones(4, 8, dtype=torch.int32))
    assert str(error.value) == (
        "per_tensor_cast_to_fp8: x is torch.int32; needs one of bfloat16, float16, float32. Cast it first."
    )
