"""The arithmetic that every backend shares: random numbers, weights, shares, draws."""

from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.ops.sampling import numbers


def test_philox_gives_the_published_numbers():
    """The known answer of Random123 for a counter and a key of zeros."""
    zero = torch.zeros(1, dtype=torch.int64)
    high, low = numbers.philox(zero, zero, 0)
    assert (int(high), int(low)) == (0x6627E8D5 >> 1, 0xE169C58D >> 1)


def _philox(seed, position, stream):
    mask = 0xFFFFFFFF
    c = [position & mask, position >> 32 & mask, stream, 0]
    k = [seed & mask, seed >> 32 & mask]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & mask, (a >> 32) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c[0] >> 1, c[1] >> 1


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**62), st.integers(0, 2))
@settings(max_examples=100, deadline=None)
def test_philox_is_its_definition(seed, position, stream):
    made = numbers.philox(torch.tensor([seed]), torch.tensor([position]), stream)
    assert tuple(int(v) for v in made) == _philox(seed, position, stream)


@given(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1), st.integers(1, 2**62 - 1))
@settings(max_examples=200, deadline=None)
def test_below_is_the_product_of_62_bits(high, low, total):
    made = numbers.below((torch.tensor([high]), torch.tensor([low])), torch.tensor([total]))
    assert int(made) == (high * 2**31 + low) * total >> 62


@given(st.integers(0, 2**62 - 1), st.floats(0, 2, width=32))
@settings(max_examples=200, deadline=None)
def test_share_rounds_up(total, p):
    parts = Fraction(max(1, int(min(p, 1.0) * 2**24)), 2**24)
    assert int(numbers.share(torch.tensor([total]), torch.tensor([p]))) == -int(-total * parts // 1)


def test_weights_are_exponentials():
    """To 2^-22 of themselves for the size of the exponent, and 2^-40 of the largest."""
    x = torch.cat((torch.zeros(1), -torch.rand(20000) * 30)).double().float()[None]
    for temperature in (0.3, 1.0, 7.0):
        slope = numbers.slopes(torch.tensor([temperature]))
        w = numbers.weights(x, slope)[0]
        wanted = torch.exp(x[0].double() / temperature) * 2.0**numbers.UNIT
        size = 1 + (-x[0].double() / temperature)
        assert ((w - wanted).abs() <= wanted * size * 2.0**-22 + 1).all()
    assert w[0] == 1 << numbers.UNIT


def test_weights_do_not_rise_with_the_distance():
    x = -torch.linspace(0, 45, 200001)[None]
    w = numbers.weights(x, numbers.slopes(torch.ones(1)))[0]
    assert (w.diff() <= 0).all()
    assert w[-1] == 0


def test_keys_have_the_order_of_numbers():
    x = torch.tensor([-torch.inf, -numbers.LARGEST, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, numbers.LARGEST])
    keys = numbers.ordered(x)
    assert keys[0] == numbers.NOTHING
    assert keys[4] == keys[5]
    assert torch.equal(keys.sort().values, keys)
    assert len(keys.unique()) == len(x) - 1


def test_a_draw_is_the_first_token_beyond():
    w = torch.tensor([[0, 3, 0, 2], [0, 0, 0, 0]])
    drawn = [numbers.draw(w, torch.tensor([u, 0])).tolist() for u in range(5)]
    assert drawn == [[1, -1], [1, -1], [1, -1], [3, -1], [3, -1]]
