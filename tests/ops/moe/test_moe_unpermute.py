"""moe_unpermute: a weighted sum that is rounded once."""

import torch
from tests.ops.sampling.places import everywhere

from tilewright import ops


@everywhere
def test_back_in_the_order_of_tokens(place):
    x = torch.randn(9, 24).to(place.device)
    ids = torch.rand(9, 5).argsort(1)[:, :3].to(place.device)
    slots, positions, *_ = ops.moe_align(ids, 5, backend=place.backend)
    y = ops.moe_permute(x, slots, positions, backend=place.backend)
    weights = torch.full((9, 3), 0.25, device=place.device)
    assert torch.equal(ops.moe_unpermute(y, weights, slots, positions, backend=place.backend), 0.75 * x)


@everywhere
def test_rows_of_dropped_slots_are_not_read(place):
    ids = torch.tensor([[0, -1], [-1, -1]], device=place.device)
    slots, positions, *_ = ops.moe_align(ids, 2, backend=place.backend)
    y = torch.full((4, 16), torch.nan, device=place.device)
    y[0] = 3.0
    y.requires_grad_()
    weights = torch.full((2, 2), 2.0, device=place.device, requires_grad=True)
    x = ops.moe_unpermute(y, weights, slots, positions, backend=place.backend)
    assert x.tolist() == [[6.0] * 16, [0.0] * 16]
    dy, dweights = torch.autograd.grad(x, (y, weights), torch.ones_like(x))
    assert dy.tolist() == [[2.0] * 16] + [[0.0] * 16] * 3
    assert dweights.tolist() == [[48.0, 0.0], [0.0, 0.0]]


@everywhere
def test_one_rounding(place):
    """256 + 1 + 1 is 258 in bfloat16, and would be 256 if each sum was rounded."""
    y = torch.tensor([256.0, 1.0, 1.0], device=place.device)[:, None].expand(3, 8).bfloat16().contiguous()
    order = torch.arange(3, dtype=torch.int32, device=place.device)
    weights = torch.ones(1, 3, dtype=torch.bfloat16, device=place.device)
    assert ops.moe_unpermute(y, weights, order, order[None], backend=place.backend).float().tolist() == [[258.0] * 8]
