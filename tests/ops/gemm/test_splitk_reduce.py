"""splitk_reduce: in order, bit for bit, and the epilogue of matmul."""

import pytest
import torch
from tests.ops.gemm.bounds import Place, operands

from tilewright import ops
from tilewright.ops.gemm.operands import apply_epilogue

PLACES = [
    pytest.param(Place("cpu", "torch"), id="cpu-torch"),
    pytest.param(Place("cpu", "triton"), id="interpreter", marks=pytest.mark.interp),
    *(pytest.param(Place("cuda", b), id=b, marks=pytest.mark.gpu) for b in ("triton", "torch")),
]
on_every_place = pytest.mark.parametrize("place", PLACES)


@on_every_place
@pytest.mark.parametrize("parts", [1, 2, 3, 8, 9, 17])
def test_the_order_of_the_sum_is_that_of_the_parts(parts, place):
    """Magnitudes over 40 octaves: any other order, or a tree, rounds differently.  8 parts are read at once."""
    partials = torch.randn(parts, 5, 1100) * torch.exp2(40 * torch.rand(parts, 5, 1100) - 20)
    wanted = partials[0].clone()
    for part in partials[1:]:
        wanted += part
    made = ops.splitk_reduce(partials.to(place.device), backend=place.backend)
    assert torch.equal(made.cpu(), wanted)
    assert parts < 3 or not torch.equal(partials.flip(0).sum(0), wanted)


@on_every_place
@pytest.mark.parametrize("shape", [(3, 1, 11), (1, 1, 1), (2, 7, 1)], ids=str)
def test_sizes_of_one(shape, place):
    """Triton makes a constant of every size that is 1."""
    partials = torch.randn(shape, device=place.device)
    made = ops.splitk_reduce(partials, backend=place.backend)
    torch.testing.assert_close(made, partials.sum(0), rtol=1e-6, atol=1e-6)


@on_every_place
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu", "swiglu"])
def test_the_epilogue_is_that_of_matmul(activation, place):
    a, b = operands(36, 80, 64, "nt", torch.bfloat16, place.device)
    bias = torch.randn(80, device=place.device)
    c = torch.randn(36, 40 if activation == "swiglu" else 80, device=place.device)
    options = {"bias": bias, "activation": activation, "c": c, "out_dtype": torch.float32}
    partials = torch.stack([a[:, k : k + 16].float() @ b[k : k + 16].float() for k in range(0, 64, 16)])
    made = ops.splitk_reduce(partials, backend=place.backend, **options)
    torch.testing.assert_close(made, ops.matmul(a, b, backend="torch", **options), rtol=1e-5, atol=1e-5)
    wanted = apply_epilogue(partials.double().sum(0), bias, c, activation or "", torch.float32)
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)


@on_every_place
@pytest.mark.parametrize("parts", [1, 2, 9])
def test_the_sign_of_a_zero_is_that_of_the_sum(parts, place):
    partials = torch.full((parts, 3, 40), -0.0, device=place.device)
    partials[-1, :, ::2] = 0.0
    signs = ops.splitk_reduce(partials, backend=place.backend).signbit()
    assert signs[:, 1::2].all()
    assert not signs[:, ::2].any()


@on_every_place
@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_residual_with_rows_of_any_stride(bias, activation, place):
    """As one line with rows of its own length, row by row with others."""
    partials = torch.randn(3, 7, 260, device=place.device)
    n = 130 if activation else 260
    options = {"activation": activation, "bias": torch.randn(260, device=place.device) if bias else None}
    plain = ops.splitk_reduce(partials, backend=place.backend, **options)
    row = torch.randn(n, device=place.device)
    for c in (row.repeat(7, 1), row.expand(7, n), torch.nn.functional.pad(row.repeat(7, 1), (0, 6))[:, :n]):
        made = ops.splitk_reduce(partials, c=c, backend=place.backend, **options)
        torch.testing.assert_close(made, plain + row, rtol=1e-5, atol=1e-5)


@on_every_place
def test_one_part_is_copied(place):
    partials = torch.randn(1, 6, 40, device=place.device)
    before = partials.clone()
    ops.splitk_reduce(partials, backend=place.backend).zero_()
    assert torch.equal(partials, before)


@on_every_place
def test_c_may_be_out(place):
    partials, total = torch.randn(4, 6, 40, device=place.device), torch.randn(6, 40, device=place.device)
    wanted = ops.splitk_reduce(partials, c=total.clone(), backend=place.backend)
    assert ops.splitk_reduce(partials, c=total, out=total, backend=place.backend) is total
    assert torch.equal(total, wanted)


@on_every_place
def test_special_values(place):
    partials = torch.zeros(3, 2, 40, device=place.device)
    partials[0, 0, 3], partials[1, 0, 3] = torch.inf, -torch.inf
    partials[2, 1, 39] = torch.nan
    made = ops.splitk_reduce(partials, activation="relu", backend=place.backend)
    assert made.isnan().nonzero().tolist() == [[0, 3], [1, 39]]
