"""k_grouped_matmul: sums over groups of rows, added to c; empty groups are c, or zeros."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ops.gemm.bounds import Place
from tests.ops.gemm.grouped_problems import FP8, HALF, along_k, int32, on_every_place, operand

from tilewright.errors import BackendError, InputError
from tilewright.ops.gemm.grouped.args import KGroupedArgs
from tilewright.ops.gemm.grouped.reference import _scaled_along_k, product_along_k, scaled
from tilewright.ops.gemm.k_grouped_matmul import k_grouped_matmul
from tilewright.ops.gemm.scaled import cublas as scaled_cublas
from tilewright.ops.quant.layout import TOKEN


@on_every_place
@pytest.mark.parametrize("layout", ["tn", "nt", "nn", "tt"])
def test_groups_along_k(layout, place):
    along_k(place, (70, 0, 13, 1), layout=layout, behind=5)


@on_every_place
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(dtype, place):
    along_k(place, (5, 0, 37), dtype=dtype)


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
    """What is handed to it: zeros in place of the other groups, whatever lies outside of all of them."""
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


SIZES = st.lists(st.one_of(st.just(0), st.integers(1, 9), st.integers(60, 70)), min_size=1, max_size=7)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.parametrize(
    "place", [Place("cpu", "torch"), pytest.param(Place("cpu", "triton"), marks=pytest.mark.interp)]
)
def test_any_groups(data, place):
    layout, behind = data.draw(st.sampled_from(["tn", "nt"])), data.draw(st.integers(0, 9)) + 1
    along_k(place, data.draw(SIZES), layout=layout, behind=behind)


def test_it_is_the_weight_gradient_of_each_expert():
    x, dy, w = torch.randn(11, 6), torch.randn(11, 8), torch.randn(3, 6, 8, requires_grad=True)
    ends = (4, 4, 11)
    y = torch.cat([rows @ expert for rows, expert in zip(x.split([4, 0, 7]), w, strict=True)])
    (wanted,) = torch.autograd.grad(y, w, dy)
    torch.testing.assert_close(k_grouped_matmul(x, dy, int32(ends, "cpu"), trans_a=True), wanted)


def test_the_float32_sum_and_c_are_rounded_once():
    x, dy, c = torch.randn(300, 6).to(HALF), torch.randn(300, 8).to(HALF), torch.randn(1, 6, 8).to(HALF)
    ends = int32((300,), "cpu")
    wide = k_grouped_matmul(x, dy, ends, c=c, trans_a=True)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double()[0], x.double().T @ dy.double() + c.double()[0], rtol=1e-5, atol=1e-4)
    assert torch.equal(k_grouped_matmul(x, dy, ends, c=c, trans_a=True, out_dtype=HALF), wide.to(HALF))


def test_what_it_cannot_do_is_said():
    a, b, ends = torch.randn(4, 8), torch.randn(8, 6), int32((4, 8), "cpu")
    with pytest.raises(InputError, match="k_grouped_matmul has no gradient"):
        k_grouped_matmul(a, b.clone().requires_grad_(), ends)
    with pytest.raises(InputError, match=r"needs \(M, T\) and \(T, N\) of one T"):
        k_grouped_matmul(a, b[:7], ends)
