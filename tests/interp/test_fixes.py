"""Triton's interpreter, repaired, computes what torch computes; unrepaired, most of these fail."""

import pytest
import torch

pytestmark = pytest.mark.interp


@pytest.fixture
def kernels():
    from tests.harness import kernels

    return kernels


def test_a_loop_with_a_run_time_bound_and_a_tail(kernels):
    x = torch.randn(3, 300).bfloat16()
    torch.testing.assert_close(kernels.row_sum(x, BLOCK_N=64), x.float().sum(1))


def test_autotune_takes_the_first_configuration(kernels):
    x = torch.randn(2, 700)
    torch.testing.assert_close(kernels.row_sum(x, kernels.tuned_row_sum_kernel), x.sum(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_dot_multiplies_numbers_not_bit_patterns(kernels, dtype):
    a, b = (torch.randn(32, 32).to(dtype) for _ in range(2))
    c = torch.empty(32, 32)
    kernels.matmul_kernel[(1,)](a, b, c, 32, "ieee")
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_bf16_arithmetic_rounds_like_torch(kernels):
    x, y = (torch.randn(100).bfloat16() for _ in range(2))
    out = torch.empty_like(x)
    kernels.bf16_arithmetic_kernel[(1,)](x, y, out, 100, BLOCK=128)
    assert torch.equal(out, torch.maximum(x * y + x, y))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_round_to_nearest_even_bit_for_bit(kernels, dtype):
    x = torch.randn(1024) * 8
    out = torch.empty(1024, dtype=dtype)
    kernels.cast_kernel[(1,)](x, out, BLOCK=1024)
    assert torch.equal(out.view(torch.uint8), x.to(dtype).view(torch.uint8))


def test_a_reduction_of_bit_patterns_raises_instead_of_being_wrong(kernels):
    from triton.runtime.errors import InterpreterError

    with pytest.raises(InterpreterError, match="convert to float32"):
        kernels.bf16_sum_kernel[(1,)](
            torch.ones(16, dtype=torch.bfloat16), torch.empty(1, dtype=torch.bfloat16), BLOCK=16
        )


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_a_reduction_of_one_s_own_takes_tuples_along_any_axis(kernels, axis):
    x = torch.randint(5, (8, 4)).float()  # with equals, of which the first counts
    values, places = torch.empty(8, 4), torch.empty(8, 4, dtype=torch.int32)
    kernels.largest_kernel[(1,)](x, values, places, 8, 4, axis)
    along = (0, 1) if axis is None else axis
    assert torch.equal(values, x.amax(along, keepdim=True).expand(8, 4))
    first = torch.arange(32, dtype=torch.int32).view(8, 4).where(x == values, 99).amin(along, keepdim=True)
    assert torch.equal(places, first.expand(8, 4))


def test_integers_wrap_around(kernels):
    out = torch.empty(3, dtype=torch.int64)
    kernels.wrapping_kernel[(1,)](torch.tensor([2**31 - 1], dtype=torch.int32), out)
    assert out.tolist() == [-2, 2**31 - 4, 3 * (2**31 - 1) - 1]
