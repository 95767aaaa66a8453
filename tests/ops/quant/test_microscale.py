"""The arithmetic of e2m1: every number of it, the nearest of them by search."""

import math

import torch
from tests.ops.quant.microscale_parts import E2M1, nearest

from tilewright.ops.quant import microscale


def test_every_code_has_its_number():
    codes = torch.arange(256, dtype=torch.uint8)
    low, high = microscale.unpack(codes[:, None]).unbind(-1)
    numbers = [*E2M1, *(-number for number in E2M1)]
    assert low.tolist() == [numbers[code & 15] for code in range(256)]
    assert high.tolist() == [numbers[code >> 4] for code in range(256)]
    assert math.copysign(1, low[8]) == -1, "a zero keeps its sign"


def test_codes_are_the_nearest_with_ties_to_even():
    x = torch.cat((torch.arange(-640, 641) / 64, torch.tensor([7.0, 1e30, 0.2500001, 1.2499999, 1e-40])))
    codes = microscale.encode(x)
    assert [code & 7 for code in codes.tolist()] == [nearest(v, E2M1) for v in x.tolist()]
    assert torch.equal(codes > 7, x.signbit())
