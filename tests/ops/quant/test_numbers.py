"""The arithmetic of quantisation: what is exact, what the rounding may cost, and what NaN and infinity become."""

import pytest
import torch

from tilewright.ops.quant import numbers
from tilewright.ops.quant.formats import CHANNEL, granularity, pair
from tilewright.ops.quant.layout import BLOCK, ROW, TENSOR, TOKEN, TOKEN_UE8M0

LAYOUTS = {"token": TOKEN, "block": BLOCK, "row": ROW, "tensor": TENSOR, "channel": CHANNEL}
SHAPES = ((1, 1), (3, 128), (130, 300), (257, 40), (2, 5, 260))
HALF_STEP = 2.0**-4  # of e4m3, relative: three bits of mantissa


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_comes_back_is_half_a_step_away(name, shape):
    layout, x = LAYOUTS[name], torch.randn(shape)
    q, scales = numbers.cast(x, layout)
    assert q.is_contiguous()
    assert layout.mismatch(scales, *shape[-2:]) is None
    assert (scales.shape, scales.stride()) == pair(shape, layout)[1][::2]
    spread = numbers.spread(scales, layout, *shape[-2:])
    # an element keeps half a step of its own size, or of the smallest step of its block
    allowed = torch.maximum(x.abs() * HALF_STEP, spread * 2.0**-10) * (1 + 1e-6)
    assert ((numbers.restore(q, scales, layout, torch.float32) - x).abs() <= allowed).all()
    assert granularity(q, scales).shape(*shape[-2:]) == layout.shape(*shape[-2:])


def test_the_largest_element_of_a_block_is_448():
    """For any float32: neither the scale's rounding nor its reciprocal's takes it to 416, or beyond."""
    mantissas = torch.arange(1 << 23, dtype=torch.int32)[:: 1 << 7]
    for exponent in (115, 127, 200):
        x = (mantissas | exponent << 23).view(torch.float32).unsqueeze(1)
        q, _ = numbers.cast(x, ROW)
        assert (q.float() == 448.0).all()


def test_powers_of_two_are_exact_at_their_edges():
    """amax = 448 * 2^k gives 2^k; the next float32 above it gives 2^(k + 1), and the next below still 2^k."""
    power = torch.exp2(torch.arange(-20.0, 100.0))
    edge = 448 * power
    above, below = edge.nextafter(torch.tensor(torch.inf)), edge.nextafter(torch.tensor(0.0))
    for amax, expected in ((edge, power), (above, 2 * power), (below, power)):
        kept = amax >= 1e-4
        assert torch.equal(numbers.scale_of(amax, True)[kept], expected[kept])
        assert torch.equal(numbers.scale_of(amax.double(), True)[kept], expected.double()[kept])


def test_packed_exponents_are_the_scales():
    x = torch.randn(2, 9, 700) * torch.exp2(torch.randint(-15, 60, (2, 9, 1)))
    q, words = numbers.cast(x, TOKEN_UE8M0, True)
    same_q, scales = numbers.cast(x, TOKEN, True)
    assert torch.equal(q.view(torch.uint8), same_q.view(torch.uint8))
    assert torch.equal(numbers.unpack(words, 6), scales)
    assert words.shape == (2, 9, 2)
    assert (words[..., 1] >> 16 == 0).all(), "exponents of blocks that do not exist"
    assert words[0, 0, 0] & 255 == torch.log2(scales[0, 0, 0]) + 127, "the first block is the lowest byte"


@pytest.mark.parametrize("layout", [TOKEN, TOKEN_UE8M0], ids=["plain", "packed"])
def test_nothing_of_a_faulty_block_survives(layout):
    x = torch.randn(4, 256)
    x[0, 3], x[1, 200], x[2, 0] = torch.nan, torch.inf, -torch.inf
    faulty = torch.zeros(4, 2, dtype=torch.bool)
    faulty[0, 0] = faulty[1, 1] = faulty[2, 0] = True
    for ue8m0 in (False, True) if layout is TOKEN else (True,):
        q, scales = numbers.cast(x, layout, ue8m0)
        restored = numbers.restore(q, scales, layout, torch.float32)
        assert torch.equal(restored.isnan(), faulty.repeat_interleave(128, 1))
        if layout is TOKEN:
            assert scales[0, 0].isnan()
            assert scales[1, 1] == scales[2, 0] == torch.inf


def test_zeros_stay_zeros_and_tiny_blocks_have_the_least_scale():
    q, scales = numbers.cast(torch.tensor([[0.0], [1e-10]]).expand(2, 128), TOKEN)
    assert (q.float() == 0).all()
    assert (scales == torch.tensor(1e-4) * numbers.INVERSE_MAX).all()


def test_an_oracle_is_not_rounded():
    x = torch.randn(5, 300, dtype=torch.float64)
    q, scales = numbers.cast(x, TOKEN)
    assert q.dtype == scales.dtype == torch.float64
    torch.testing.assert_close(numbers.restore(q, scales, TOKEN, torch.float64), x, rtol=1e-15, atol=0)


@pytest.mark.parametrize("shape", [(0, 300), (3, 0), (0, 0), (2, 0, 5)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_of_nothing(name, shape):
    q, scales = numbers.cast(torch.empty(shape), LAYOUTS[name])
    assert q.shape == shape
    assert scales.shape == pair(shape, LAYOUTS[name])[1][0]
    assert numbers.restore(q, scales, LAYOUTS[name], torch.float32).shape == shape
