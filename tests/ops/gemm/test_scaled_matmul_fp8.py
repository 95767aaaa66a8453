"""scaled_matmul_fp8: the cast of the float32 result, and a chain of products that never leaves float8."""

import pytest
import torch
from tests.ops.gemm.bounds import PLACES, run
from tests.ops.gemm.scaled_problems import PAIRS, Operands, every, operands

from tilewright.ops.gemm.scaled_matmul import scaled_matmul
from tilewright.ops.gemm.scaled_matmul_fp8 import scaled_matmul_fp8
from tilewright.ops.quant.layout import BLOCK, TOKEN
from tilewright.ops.quant.numbers import cast

FP8 = torch.float8_e4m3fn
STEP = 2.0**-4  # e4m3 rounds by at most this share of a number, or by half of 2^-9


def check(q, scales, exact):
    """Scales are those of the exact result's blocks, up to what tensor cores round; elements are off by half a step."""
    rows, columns = exact.shape
    assert (q.dtype, scales.dtype) == (FP8, torch.float32)
    assert TOKEN.mismatch(scales, rows, columns) is None
    blocks = torch.nn.functional.pad(exact, (0, -columns % 128)).unflatten(1, (-1, 128))
    wanted = blocks.abs().amax(-1).clamp(min=1e-4) / 448
    assert torch.allclose(scales.double(), wanted, rtol=2e-3, atol=0)
    unit = every(scales, rows, columns)
    off = (q.double() * unit - exact).abs()
    short = 2**-9 * 448 * unit if q.device.type == "cuda" else 0  # what tensor cores leave of a sum that cancels
    assert (off <= 1.05 * torch.maximum(STEP * exact.abs(), 2**-10 * unit) + short).all()
    assert q.double().abs().max() == 448, "the largest of a block is the largest there is"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("activation", [None, "silu", "swiglu"])
@pytest.mark.parametrize("pair", PAIRS)
def test_every_scaling(pair, activation, place):
    for m, n, k in ((70, 400, 328), (5, 256, 272), (130, 272, 144)):
        problem = operands(m, n, k, pair, device=place.device)
        bias = torch.randn(n).to(place.device)
        q, scales = run(scaled_matmul_fp8, *problem.public(), bias=bias, activation=activation, alpha=0.7, place=place)
        check(q, scales, problem.exact(bias, None, 0.7, activation or ""))


def test_it_is_the_cast_of_the_float32_result():
    problem = operands(36, 400, 272)
    q, scales = scaled_matmul_fp8(*problem.public(), activation="swiglu")
    z = scaled_matmul(*problem.public(), activation="swiglu", out_dtype=torch.float32)
    expected = cast(z, TOKEN)
    assert torch.equal(q.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scales, expected[1])
    assert scales.stride() == expected[1].stride()


def test_the_next_product_takes_it_as_it_is():
    first, weights = operands(36, 400, 272), operands(1, 72, 200)
    q, scales = scaled_matmul_fp8(*first.public(), activation="swiglu")
    second = Operands(q, weights.b, scales, weights.scale_b)
    made = scaled_matmul(*second.public(), out_dtype=torch.float32)
    assert BLOCK.mismatch(weights.scale_b, 72, 200) is None
    assert torch.allclose(made.double(), second.exact(), rtol=1e-5, atol=1e-4)


def test_leading_dimensions():
    problem = operands(21, 144, 272)
    a, *rest = problem.public()
    q, scales = scaled_matmul_fp8(a.view(3, 7, 272), rest[0], rest[1].unflatten(0, (3, 7)), rest[2])
    flat_q, flat_scales = scaled_matmul_fp8(*problem.public())
    assert (q.shape, scales.shape) == ((3, 7, 144), (3, 7, 2))
    assert torch.equal(q.flatten(0, 1).view(torch.uint8), flat_q.view(torch.uint8))
    assert torch.equal(scales.flatten(0, 1), flat_scales)


def test_small_and_broken_results():
    """A block of zeros has the least scale; one with a NaN is NaN, and its neighbours are not."""
    problem = operands(20, 256, 272)
    problem.a[2] = 0
    problem.scale_a[5] = torch.nan
    q, scales = scaled_matmul_fp8(*problem.public())
    assert (q[2].float() == 0).all()
    assert torch.allclose(scales[2], torch.tensor(1e-4 / 448))
    assert scales[5].isnan().all()
    assert not scales[torch.arange(20) != 5].isnan().any()
