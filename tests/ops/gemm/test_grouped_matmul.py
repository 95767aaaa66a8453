"""grouped_matmul: every group is right wherever it begins and ends, and nothing else is written."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ops.gemm.bounds import Place, run
from tests.ops.gemm.grouped_problems import FP8, HALF, grouped, int32, on_every_place

from tilewright.errors import InputError
from tilewright.ops.gemm.grouped_matmul import grouped_matmul
from tilewright.ops.gemm.scaled.scaling import Scaling

SIZES = {
    "ragged": (5, 0, 37, 1, 70),
    "one_has_all": (0, 0, 90, 0),
    "below_a_tile": (1, 2, 3, 1),
    "empty_ends": (0, 20, 0),
    "nothing": (0, 0, 0),
}


@on_every_place
@pytest.mark.parametrize("name", SIZES)
def test_groups_that_follow_each_other(name, place):
    grouped(place, SIZES[name])


@on_every_place
def test_groups_with_gaps_begin_anywhere(place):
    grouped(place, (5, 0, 37, 20), gaps=(3, 0, 1, 9))
    grouped(place, (17, 66), gaps=(1, 1), layout="nn")


@on_every_place
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(dtype, place):
    grouped(place, (5, 0, 37), dtype=dtype)


@on_every_place
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "swiglu"])
def test_activations(activation, place):
    grouped(place, (5, 0, 37), activation=activation)


@on_every_place
@pytest.mark.parametrize("scaling", [Scaling.TENSOR, Scaling.ROW, Scaling.TOKEN_BLOCK, Scaling.TOKEN_TOKEN], ids=str)
def test_scales(scaling, place):
    grouped(place, (5, 0, 37, 20), 160, 272, gaps=(3, 0, 1, 9), dtype=FP8, scaling=scaling)


@on_every_place
def test_float8_without_scales(place):
    grouped(place, (5, 0, 37), 64, 160, dtype=FP8, out_dtype=torch.float32)


@on_every_place
def test_sizes_that_lie(place):
    """Ends behind the last row and before the first are cut off; a group that ends before it begins is empty, and the
    next begins where it ends.
    """
    device = place.device
    a, b = torch.randn(20, 16, device=device).to(HALF), torch.randn(3, 16, 24, device=device).to(HALF)
    out = torch.full((20, 24), -7.0, dtype=HALF, device=device)
    run(grouped_matmul, a, b, int32((5, 3, 99), device), out=out, place=place)
    torch.testing.assert_close(out[:3], a[:3] @ b[0], rtol=2**-7, atol=2**-6)
    torch.testing.assert_close(out[5:], a[5:] @ b[2], rtol=2**-7, atol=2**-6)
    grouped_matmul(a, b, int32((-4, 2, 2), device), out=out.fill_(-7.0), backend=place.backend)
    torch.testing.assert_close(out[:2], a[:2] @ b[1], rtol=2**-7, atol=2**-6)
    assert (out[2:] == -7).all()


@on_every_place
def test_a_result_of_any_alignment(place):
    a, b = torch.randn(20, 16).to(HALF), torch.randn(2, 16, 24).to(HALF)
    a, b = a.to(place.device), b.to(place.device)
    memory = torch.full((20 * 31 + 1,), -7.0, dtype=HALF, device=place.device)
    out = memory[1:].view(20, 31)[:, 2:26]
    run(grouped_matmul, a, b, int32((3, 11), place.device), out=out, place=place)
    torch.testing.assert_close(out[3:11], a[3:11] @ b[1], rtol=2**-7, atol=2**-6)
    out[:11].fill_(-7.0)
    assert (memory == -7).all()


GROUPS = st.lists(st.one_of(st.just(0), st.integers(1, 9), st.integers(60, 70)), min_size=1, max_size=7)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.parametrize(
    "place", [Place("cpu", "torch"), pytest.param(Place("cpu", "triton"), marks=pytest.mark.interp)]
)
def test_any_groups(data, place):
    sizes = data.draw(GROUPS)
    gaps = data.draw(st.one_of(st.none(), st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes))))
    grouped(place, sizes, gaps=gaps, layout=data.draw(st.sampled_from(["nt", "nn"])))


def gradients(a, b, ends, dz, **options):
    leaves = a.detach().requires_grad_(), b.detach().requires_grad_()
    made = grouped_matmul(*leaves, ends, **options)
    return torch.autograd.grad(made, leaves, dz)


@pytest.mark.interp
@pytest.mark.parametrize("turned", [False, True])
def test_gradients_are_grouped_products(turned):
    a, w = torch.randn(20, 16), torch.randn(3, 24, 16) if turned else torch.randn(3, 16, 24).mT
    dz = torch.randn(20, 24)
    dz[15:] = torch.nan  # of no group
    ends = int32((7, 7, 15), "cpu")
    da, db = gradients(a, w.mT, ends, dz, backend="triton")
    assert da[15:].eq(0).all()
    assert db.stride() == w.mT.stride(), "a gradient lies as its weight"
    for g, rows in ((0, slice(0, 7)), (1, slice(7, 7)), (2, slice(7, 15))):
        torch.testing.assert_close(da[rows], dz[rows] @ w[g], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(db[g], a[rows].T @ dz[rows], rtol=1e-5, atol=1e-5)


def test_an_activation_is_a_separate_step_for_its_gradient():
    a, b, ends, dz = torch.randn(9, 8), torch.randn(2, 8, 12), int32((4, 9), "cpu"), torch.randn(9, 6)
    da, db = gradients(a, b, ends, dz, activation="swiglu")
    a.requires_grad_(), b.requires_grad_()
    z = torch.cat((a[:4] @ b[0], a[4:] @ b[1]))
    expected = torch.autograd.grad(torch.nn.functional.silu(z[:, ::2]) * z[:, 1::2], (a, b), dz)
    torch.testing.assert_close(da, expected[0])
    torch.testing.assert_close(db, expected[1])


def test_it_is_the_loop_that_models_write():
    """Mixtures of experts in plain torch: one linear layer an expert, over the tokens that chose it."""
    x, w, counts = torch.randn(11, 16).to(HALF), torch.randn(3, 24, 16).to(HALF), [4, 0, 7]
    made = grouped_matmul(x, w, int32((4, 4, 11), "cpu"), trans_b=True)
    wanted = torch.cat([rows @ expert.T for rows, expert in zip(x.split(counts), w, strict=True)])
    torch.testing.assert_close(made, wanted)


def test_the_float32_sum_is_rounded_once():
    x, w = torch.randn(9, 300).to(HALF), torch.randn(2, 300, 8).to(HALF)
    ends = int32((5, 9), "cpu")
    wide = grouped_matmul(x, w, ends, out_dtype=torch.float32)
    assert torch.equal(grouped_matmul(x, w, ends), wide.to(HALF))
    exact = torch.cat((x[:5].double() @ w[0].double(), x[5:].double() @ w[1].double()))
    torch.testing.assert_close(wide.double(), exact, rtol=1e-5, atol=1e-4)


def test_the_gradient_of_b_needs_groups_without_gaps():
    a, b, ends = torch.randn(4, 8), torch.randn(2, 8, 6, requires_grad=True), int32((4, 4), "cpu")
    with pytest.raises(InputError, match="needs groups without gaps"):
        grouped_matmul(a, b, ends, starts=ends)


def test_sizes_on_another_device_are_refused():
    a, b = torch.randn(4, 8), torch.randn(2, 8, 6)
    with pytest.raises(InputError, match="no kernel waits for the host"):
        grouped_matmul(a, b, torch.ones(2, dtype=torch.int32, device="meta"))


def test_scales_in_another_layout_are_copied_once_and_said(caplog, monkeypatch):
    from tilewright import settings as tilewright_settings
    from tilewright.log import forget_logged

    forget_logged()
    a, b = torch.randn(8, 256).to(FP8), torch.randn(2, 256, 128).to(FP8)
    scale_a, scale_b = torch.rand(8, 2), torch.rand(2, 2, 1)
    with caplog.at_level("INFO", "tilewright"):
        first = grouped_matmul(a, b, int32((3, 8), "cpu"), scale_a=scale_a, scale_b=scale_b)
        second = grouped_matmul(a, b, int32((3, 8), "cpu"), scale_a=scale_a, scale_b=scale_b)
    assert torch.equal(first, second)
    assert sum("grouped_matmul: the scales scale_a" in r.message for r in caplog.records) == 1
    monkeypatch.setenv("TILEWRIGHT_DISABLE_FALLBACK", "1")
    tilewright_settings.reload()
    try:
        with pytest.raises(InputError, match="TILEWRIGHT_DISABLE_FALLBACK forbids"):
            grouped_matmul(a, b, int32((3, 8), "cpu"), scale_a=scale_a, scale_b=scale_b)
    finally:
        monkeypatch.undo()
        tilewright_settings.reload()
