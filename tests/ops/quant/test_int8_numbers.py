"""The arithmetic of int8: scales, rounding, rows of zeros and of NaN; against fractions."""

from fractions import Fraction

import pytest
import torch

from tilewright.errors import InputError
from tilewright.ops.quant.int8 import AMAX_MIN, dequantise_rows, quantise_rows, scale_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_element_is_within_half_a_step(dtype):
    torch.manual_seed(0)
    x = (torch.randn(33, 257) * torch.logspace(-4, 3, 33)[:, None]).to(dtype)
    q, scales = quantise_rows(x)
    assert (q.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, (33,))
    assert (q.long().abs().amax(-1) == 127).all()
    error = (q.double() * scales.double()[:, None] - x.double()).abs()
    assert (error <= scales.double()[:, None] * (0.5 + 1e-4)).all()


def test_a_scale_is_amax_over_127():
    amax = torch.tensor([127.0, 1.0, 3e38, 1e-20])
    for got, value in zip(scale_of(amax).tolist(), amax.tolist(), strict=True):
        assert abs(Fraction(got) / (Fraction(value) / 127) - 1) < Fraction(1, 2**22)


def test_halves_round_to_even():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]]) * 2.0**100
    q, scales = quantise_rows(x)
    assert scales.item() == 2.0**100
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, -2]]


def test_zeros_subnormals_and_the_largest_numbers():
    largest = torch.finfo(torch.float32).max
    q, scales = quantise_rows(torch.tensor([[0.0, -0.0], [1e-44, 0.0], [AMAX_MIN, -AMAX_MIN], [largest, -largest]]))
    assert q.tolist() == [[0, 0], [0, 0], [127, -127], [127, -127]]
    assert scales.isfinite().all() and (scales > 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_becomes_nan_alone(value):
    x = torch.ones(3, 4)
    x[1, 2] = value
    q, scales = quantise_rows(x)
    restored = dequantise_rows(q, scales, torch.float32)
    assert restored[1].isnan().all() and restored[[0, 2]].isfinite().all()


def test_no_rows_and_no_columns():
    assert [t.shape for t in quantise_rows(torch.ones(0, 4))] == [(0, 4), (0,)]
    assert [t.shape for t in quantise_rows(torch.ones(2, 3, 0))] == [(2, 3, 0), (2, 3)]


def test_bad_inputs():
    with pytest.raises(InputError, match=r"x is torch\.int32"):
        quantise_rows(torch.ones(2, 2, dtype=torch.int32))
    with pytest.raises(InputError, match=r"needs \(\.\.\., R, K\)"):
        quantise_rows(torch.ones(2))
