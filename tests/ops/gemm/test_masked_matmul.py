"""masked_matmul: the first rows of each matrix, times its own matrix; other rows are not written."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ops.gemm.bounds import Place, run
from tests.ops.gemm.grouped_problems import FP8, HALF, int32, masked, on_every_place

from tilewright.errors import InputError
from tilewright.ops.gemm.masked_matmul import FORWARD, masked_matmul
from tilewright.ops.gemm.scaled.scaling import Scaling


@on_every_place
def test_masks(place):
    masked(place, (5, 0, 70, 1, 24), 70)
    masked(place, (9,), 24)
    masked(place, (0, 0), 24)


@on_every_place
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(dtype, place):
    masked(place, (5, 0, 20), 24, dtype=dtype)


@on_every_place
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "swiglu"])
def test_activations(activation, place):
    masked(place, (5, 0, 20), 24, activation=activation)


@on_every_place
@pytest.mark.parametrize("scaling", [Scaling.TENSOR, Scaling.ROW, Scaling.TOKEN_BLOCK, Scaling.TOKEN_TOKEN], ids=str)
def test_scales(scaling, place):
    masked(place, (5, 0, 20), 24, 144, 272, dtype=FP8, scaling=scaling)


@on_every_place
def test_sizes_that_lie(place):
    """Counts above Mmax and below 0 are cut off."""
    device = place.device
    a, b = torch.randn(3, 4, 16, device=device).to(HALF), torch.randn(3, 16, 24, device=device).to(HALF)
    out = torch.full((3, 4, 24), -7.0, dtype=HALF, device=device)
    run(masked_matmul, a, b, int32((99, -5, 4), device), place=place, out=out)
    assert (out[1] == -7).all()
    torch.testing.assert_close(out[::2], torch.bmm(a, b)[::2], rtol=2**-7, atol=2**-6)


SIZES = st.lists(st.one_of(st.just(0), st.integers(1, 9), st.integers(60, 70)), min_size=1, max_size=7)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.parametrize(
    "place", [Place("cpu", "torch"), pytest.param(Place("cpu", "triton"), marks=pytest.mark.interp)]
)
def test_any_counts(data, place):
    sizes = data.draw(SIZES)
    masked(place, sizes, max(*sizes, 1) + data.draw(st.integers(0, 9)))


def test_it_is_bmm_of_the_rows_that_count():
    a, b, rows = torch.randn(3, 5, 16), torch.randn(3, 16, 24), (5, 0, 2)
    made = masked_matmul(a, b, int32(rows, "cpu"))
    for g, count in enumerate(rows):
        torch.testing.assert_close(made[g, :count], a[g, :count] @ b[g])


def test_expected_rows_choose_a_kernel_and_change_no_result():
    a, b, rows = torch.randn(2, 70, 16), torch.randn(2, 16, 24), int32((70, 3), "cpu")
    few, many = (masked_matmul(a, b, rows, expected_rows=n) for n in (8, 4096))
    assert torch.equal(few[0], many[0]) and torch.equal(few[1, :3], many[1, :3])
    buckets = [FORWARD.bucket(a, b, None, None, None, rows, n, "", a.dtype) for n in (8, 4096)]
    assert [bucket.rows for bucket in buckets] == [8, 4096]


def test_what_it_cannot_do_is_said():
    a, b, rows = torch.randn(2, 4, 8), torch.randn(2, 8, 6), int32((4, 4), "cpu")
    with pytest.raises(InputError, match="masked_matmul has no gradient"):
        masked_matmul(a.clone().requires_grad_(), b, rows)
    with pytest.raises(InputError, match="a has 2 groups, b has 3; they must agree in G"):
        masked_matmul(a, torch.randn(3, 8, 6), rows)
    with pytest.raises(InputError, match="expected_rows is a float; needs an integer"):
        masked_matmul(a, b, rows, expected_rows=2.5)
