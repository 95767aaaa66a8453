"""Grouped products: every group is right wherever it lies, and nothing else is written."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ops.gemm.bounds import Place, run
from tests.ops.gemm.grouped_problems import FP8, HALF, along_k, grouped, int32, masked, on_every_place, operand

from tilewright.errors import BackendError, InputError
from tilewright.ops.gemm.grouped.args import KGroupedArgs
from tilewright.ops.gemm.grouped.reference import _scaled_along_k, product_along_k, scaled
from tilewright.ops.gemm.grouped_matmul import grouped_matmul
from tilewright.ops.gemm.k_grouped_matmul import k_grouped_matmul
from tilewright.ops.gemm.masked_matmul import masked_matmul
from tilewright.ops.gemm.scaled import cublas as scaled_cublas
from tilewright.ops.gemm.scaled.scaling import Scaling
from tilewright.ops.quant.layout import TOKEN

SIZES = {
    "ragged": (5, 0, 37, 1, 70),
    "one_has_all": (0, 0, 90, 0),
    "below_a_tile": (1, 2, 3, 1),
    "empty_ends": (0, 20, 0),
    "nothing": (0, 0, 0),
}


@on_every_place
@pytest.mark.parametrize("name", SIZES)
def test_groups_one_behind_the_other(name, place):
    grouped(place, SIZES[name])


@on_every_place
def test_groups_with_gaps_begin_anywhere(place):
    grouped(place, (5, 0, 37, 20), gaps=(3, 0, 1, 9))
    grouped(place, (17, 66), gaps=(1, 1), layout="nn")


@on_every_place
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(dtype, place):
    grouped(place, (5, 0, 37), dtype=dtype)
    masked(place, (5, 0, 20), 24, dtype=dtype)
    along_k(place, (5, 0, 37), dtype=dtype)


@on_every_place
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "swiglu"])
def test_activations(activation, place):
    grouped(place, (5, 0, 37), activation=activation)
    masked(place, (5, 0, 20), 24, activation=activation)


@on_every_place
@pytest.mark.parametrize("scaling", [Scaling.TENSOR, Scaling.ROW, Scaling.TOKEN_BLOCK, Scaling.TOKEN_TOKEN], ids=str)
def test_scales(scaling, place):
    grouped(place, (5, 0, 37, 20), 160, 272, gaps=(3, 0, 1, 9), dtype=FP8, scaling=scaling)
    masked(place, (5, 0, 20), 24, 144, 272, dtype=FP8, scaling=scaling)


@on_every_place
def test_float8_without_scales(place):
    grouped(place, (5, 0, 37), 64, 160, dtype=FP8, out_dtype=torch.float32)


@on_every_place
def test_masks(place):
    masked(place, (5, 0, 70, 1, 24), 70)
    masked(place, (9,), 24)
    masked(place, (0, 0), 24)


@on_every_place
@pytest.mark.parametrize("layout", ["tn", "nt", "nn", "tt"])
def test_groups_along_k(layout, place):
    along_k(place, (70, 0, 13, 1), layout=layout, behind=5)


@on_every_place
def test_accumulation(place):
    along_k(place, (70, 0, 13), c=True)
    along_k(place, (70, 0, 13), into=True)
    along_k(place, (0, 0), into=True, behind=4)
    along_k(place, (70, 0, 13), out_dtype=HALF, c=True)


@on_every_place
def test_scales_along_k(place):
    along_k(place, (128, 0, 384), layout="nt", dtype=FP8, scaled_=True, c=True)


@pytest.mark.parametrize("turned", [False, True])
def test_scaled_groups_in_cublas(turned, monkeypatch):
    """What is handed to it: groups apart by zeros, whatever stands outside of all of them."""
    monkeypatch.setattr(
        scaled_cublas, "product", lambda a, b, of_a, of_b, dtype: scaled(a, of_a) @ scaled(b.mT, of_b).mT
    )
    (a, of_a), (b, of_b) = (operand((rows, 640), FP8, "cpu", turned=turned, layout=TOKEN) for rows in (24, 40))
    ends, c = int32((128, 128, 512), "cpu"), torch.randn(3, 24, 40)
    wanted = product_along_k(KGroupedArgs(a, b.mT, of_a, of_b, c, ends, torch.float32))
    a.view(torch.uint8)[:, 512:] = 0x7F
    of_b[:, 4:] = torch.nan
    made = _scaled_along_k(a, b.mT, of_a, of_b, c, ends, torch.float32)
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-3)


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
    stack = torch.full((3, 4, 24), -7.0, dtype=HALF, device=device)
    masked_matmul(a[:12].view(3, 4, 16), b, int32((99, -5, 4), device), out=stack, backend=place.backend)
    assert (stack[1] == -7).all()
    torch.testing.assert_close(stack[0], a[:4] @ b[0], rtol=2**-7, atol=2**-6)


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


SEARCHED = [Place("cpu", "torch"), pytest.param(Place("cpu", "triton"), marks=pytest.mark.interp)]
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
    masked(place, sizes, max(*sizes, 1) + data.draw(st.integers(0, 9)))
    along_k(place, sizes, layout=data.draw(st.sampled_from(["tn", "nt"])), behind=data.draw(st.integers(0, 9)) + 1)


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


def test_an_activation_is_taken_apart_for_its_gradient():
    a, b, ends, dz = torch.randn(9, 8), torch.randn(2, 8, 12), int32((4, 9), "cpu"), torch.randn(9, 6)
    da, db = gradients(a, b, ends, dz, activation="swiglu")
    a.requires_grad_(), b.requires_grad_()
    z = torch.cat((a[:4] @ b[0], a[4:] @ b[1]))
    expected = torch.autograd.grad(torch.nn.functional.silu(z[:, ::2]) * z[:, 1::2], (a, b), dz)
    torch.testing.assert_close(da, expected[0])
    torch.testing.assert_close(db, expected[1])


def test_what_has_no_gradient_says_so():
    a, b, ends = torch.randn(2, 4, 8, requires_grad=True), torch.randn(2, 8, 6), int32((4, 4), "cpu")
    with pytest.raises(InputError, match="masked_matmul has no gradient"):
        masked_matmul(a, b, ends)
    with pytest.raises(InputError, match="k_grouped_matmul has no gradient"):
        k_grouped_matmul(a[0], b[0].requires_grad_(), ends)
    with pytest.raises(InputError, match="needs groups without gaps"):
        grouped_matmul(a[0], b.requires_grad_(), ends, starts=ends)


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


@on_every_place
def test_a_group_that_ends_within_a_block_of_scales(place):
    """With the last row of 208, of which 80 have a scale of their own: no kernel leaves them out."""
    a, b = torch.randn(24, 208).to(place.device, FP8), torch.randn(40, 208).to(place.device, FP8)
    scale_a, scale_b = torch.rand(24, 2, device=place.device) + 0.5, torch.rand(40, 2, device=place.device) + 0.5
    ends = int32((128, 208), place.device)
    given = {"scale_a": scale_a, "scale_b": scale_b.mT}
    wanted = [scaled(a[:, r], scale_a[:, i : i + 1]) @ scaled(b[:, r], scale_b[:, i : i + 1]).mT
              for i, r in enumerate((slice(128), slice(128, 208)))]  # fmt: skip
    made = k_grouped_matmul(a, b.mT, ends, **given)
    torch.testing.assert_close(made, torch.stack(wanted), rtol=1e-2, atol=1e-1)
    if place.backend in ("cuda", "triton"):
        with pytest.raises(BackendError, match="multiples of 128"):
            k_grouped_matmul(a, b.mT, ends, **given, backend=place.backend)
