"""Casts to float8 and 4 or 8 bits, and products of what they made, in which a dimension has size 0."""

from itertools import product

import pytest
import torch
from tests.ops.gemm.bounds import PLACES, Place, run

from tilewright import ops
from tilewright.ops.gemm.operands import activate

HALF, FP8 = torch.bfloat16, torch.float8_e4m3fn
INTERPRETER = pytest.param(Place("cpu", "triton"), id="interpreter", marks=pytest.mark.interp)
on_every_place = pytest.mark.parametrize("place", [*PLACES, INTERPRETER])
CASTS = ("per_token_cast_to_fp8", "per_channel_cast_to_fp8", "per_block_cast_to_fp8", "per_tensor_cast_to_fp8")
SIZES = [size for size in product((0, 3), (0, 16), (0, 256)) if 0 in size]


@on_every_place
@pytest.mark.parametrize("shape", [(0, 256), (16, 0), (0, 0), (0, 16, 256), (2, 0, 256), (2, 16, 0)], ids=str)
@pytest.mark.parametrize("name", CASTS)
def test_casts(name, shape, place):
    x = torch.randn(shape, device=place.device).to(HALF)
    q, scales = run(getattr(ops, name), x, place=place)
    wanted = getattr(ops, name)(x.cpu(), backend="torch")
    assert [(t.shape, t.dtype) for t in (q, scales)] == [(t.shape, t.dtype) for t in wanted]
    torch.testing.assert_close(scales.cpu(), wanted[1])  # of a group of nothing, whatever the contract says of it
    assert run(ops.dequantize, q, scales, place=place).shape == shape


@on_every_place
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_weights_of_few_bits(size, bits, place):
    m, n, k = size
    x, w = torch.randn(m, k, device=place.device).to(HALF), torch.randn(n, k, device=place.device).to(HALF)
    bias = torch.randn(n, device=place.device).to(HALF)
    q, scales = run(ops.quantize_weight, w, bits=bits, place=place)
    assert (q.shape, scales.shape) == ((n, k * bits // 8), (n, -(-k // 128)))
    restored = run(ops.dequantize_weight, q, scales, dtype=torch.float32, place=place)
    assert restored.shape == (n, k)
    exact = x.double() @ restored.double().mT + bias.double()
    for activation in (None, "gelu", "swiglu"):
        wanted = activate(exact, activation or "")
        made = run(ops.weight_only_matmul, x, q, scales, bias=bias, activation=activation, place=place)
        torch.testing.assert_close(made.double(), wanted, rtol=1e-2, atol=1e-2)
        out = torch.full_like(made, torch.nan)
        run(ops.weight_only_matmul, x, q, scales, bias=bias, activation=activation, out=out, place=place)
        assert torch.equal(out, made)
        assert ops.weight_only_matmul(x.view(1, m, k), q, scales, bias=bias).shape == (1, m, n)
    learns = x.detach().requires_grad_(), bias.detach().requires_grad_()
    y = ops.weight_only_matmul(learns[0], q, scales, bias=learns[1])
    assert y.grad_fn is not None
    dx, dbias = torch.autograd.grad(y, learns, torch.ones_like(y))
    torch.testing.assert_close(dx.double(), torch.ones_like(y).double() @ restored.double(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(dbias, torch.full_like(bias, m))


@on_every_place
@pytest.mark.parametrize("scaling", ["token_block", "token_channel", "tensor"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_scaled_matmul(size, scaling, place):
    m, n, k = size
    blocks = -(-k // 128)
    shapes = {"token_block": ((m, blocks), (-(-n // 128), blocks)), "token_channel": ((m, 1), (n, 1))}
    of_a, of_b = shapes.get(scaling, ((1, 1), (1, 1)))
    a, b = (torch.randn(*shape, device=place.device).to(FP8) for shape in ((m, k), (n, k)))
    scale_a, scale_b = torch.ones(of_a, device=place.device), torch.ones(of_b, device=place.device)
    bias = torch.randn(n, device=place.device).to(HALF)
    for c in (None, torch.randn(m, n, device=place.device)):
        out = None if c is None else c.clone()
        made = run(
            ops.scaled_matmul, a, b.mT, scale_a, scale_b.mT, bias=bias, c=out, out=out, out_dtype=torch.float32,
            place=place,
        )  # fmt: skip
        wanted = a.double() @ b.double().mT + bias.double() + (0 if c is None else c)
        torch.testing.assert_close(made.double(), wanted, rtol=1e-3, atol=1e-3)
