"""The measurements that the accuracy rule is built on."""

import pytest
import torch

from tilewright.validate.bits import memory, replica, same_bits
from tilewright.validate.metrics import as_matrix, counts, errors, norms, ordered, ulp_quantile

ZERO = torch.zeros((), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ordered_counts_along_the_number_line(dtype):
    values = torch.tensor([-torch.inf, -3.0, -1e-3, -0.0, 0.0, 1e-3, 3.0, torch.inf], dtype=dtype)
    steps = ordered(values)
    assert (steps[1:] >= steps[:-1]).all()
    assert steps[3] == steps[4] == 0
    one = torch.ones(1, dtype=dtype)
    assert ordered(torch.nextafter(one.float(), one.float() * 2).to(torch.float32)) - ordered(one.float()) == 1
    assert ordered(one * (1 + torch.finfo(dtype).eps)) - ordered(one) == 1
    assert ordered(-one) == -ordered(one)


def test_the_smallest_numbers_of_both_signs_are_two_steps_apart():
    tiny = torch.tensor([2.0**-149])
    assert int(ordered(tiny) - ordered(-tiny)) == 2


def test_ulp_quantile_leaves_a_hundred_above():
    steps = torch.zeros(1000, dtype=torch.int64)
    steps[:100] = 7
    assert ulp_quantile(steps) == 0
    steps[:101] = 7
    assert ulp_quantile(steps) == 7


def test_ulp_quantile_is_the_999th_thousandth_of_many():
    steps = torch.zeros(1_000_000, dtype=torch.int64)
    steps[:1000] = 5
    assert ulp_quantile(steps) == 0
    steps[:1001] = 5
    assert ulp_quantile(steps) == 5


def test_zeros_of_the_exact_result_are_not_among_the_ulps():
    exact = torch.zeros(40, dtype=torch.float64)
    assert errors(torch.zeros(40), exact, torch.float32).ulp == 0
    exact[:10] = 1.0
    assert errors(exact.float() + 2.0**-20, exact, torch.float32).ulp == 8


def test_a_tile_norm_belongs_to_its_tile():
    values = torch.zeros(130, 200, dtype=torch.float64)
    values[64:128, 128:192] = 2.0
    found = norms(values, ZERO)
    assert found.tiles.shape == (3, 4)
    assert found.tiles[1, 2] == 2.0 * 64
    assert found.tiles.sum() == 2.0 * 64
    assert found.frobenius == 2.0 * 64
    assert found.rows[64] == 2.0 * 8
    assert found.columns[127] == 0


def test_counts_of_partial_tiles():
    found = counts(torch.zeros(70, 65))
    assert torch.allclose(found.tiles, torch.tensor([[4096.0, 64.0], [384.0, 6.0]], dtype=torch.float64))
    assert float(found.frobenius) == pytest.approx(70 * 65)


@pytest.mark.parametrize(("shape", "matrix"), [((), (1, 1)), ((5,), (1, 5)), ((2, 3, 4), (6, 4)), ((0, 4), (0, 4))])
def test_as_matrix(shape, matrix):
    assert as_matrix(torch.zeros(shape)).shape == matrix


def test_non_finite_elements_have_no_error():
    exact = torch.tensor([1.0, torch.inf, torch.nan, 2.0], dtype=torch.float64)
    found = errors(torch.tensor([1.0, torch.inf, 3.0, torch.nan]), exact, torch.float32)
    assert found.frobenius == 0
    assert found.ulp == 0


def test_cancelled_elements_have_no_ulp():
    """1e-7 in place of zero is a billion ULP, and one rounding of the terms; small values that do not cancel count."""
    exact = torch.cat((torch.ones(900), torch.zeros(200), torch.full((200,), 1e-9))).double()
    off = exact.clone()
    off[900:1100] = 1e-7
    assert errors(off.float(), exact, torch.float32).ulp == 0
    off[1100:] *= 1 + 1e-5
    assert errors(off.float(), exact, torch.float32).ulp > 50


def test_same_bits_tells_zeros_apart_and_accepts_nan():
    zero, nan = torch.tensor([0.0]), torch.tensor([torch.nan])
    assert not same_bits(zero, -zero)
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, zero.half())
    assert not same_bits(zero, zero.view(1, 1))


def test_a_replica_has_the_same_place_in_memory_of_its_own():
    parent = torch.arange(40.0).view(4, 10)
    view = parent[1:, 1:8:2]
    copy = replica(view)
    assert copy.stride() == view.stride()
    assert copy.storage_offset() == view.storage_offset()
    assert copy._base is None
    assert torch.equal(memory(copy), memory(view))
    copy.zero_()
    assert parent[1, 1] == 11


def test_a_replica_of_an_expanded_tensor_is_expanded():
    copy = replica(torch.ones(3, 1).expand(3, 5))
    assert copy.shape == (3, 5)
    assert copy.stride() == (1, 0)


def test_a_replica_keeps_the_negative_bit():
    t = torch.complex(torch.zeros(3, 4), torch.randn(3, 4)).conj().imag
    copy = replica(t)
    assert copy.is_neg()
    assert copy.stride() == t.stride()
    assert torch.equal(copy, t)
    assert copy.data_ptr() != t.data_ptr()
