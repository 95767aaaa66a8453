"""moe_permute: each row once for each of its experts."""

import torch
from tests.ops.sampling.places import everywhere

from tilewright import ops


@everywhere
def test_rows_are_copied_bit_for_bit(place):
    x = torch.randn(7, 40).bfloat16().to(place.device)
    x[3, 5] = torch.nan
    ids = torch.tensor([[1, 0], [2, -1], [0, 1], [1, 2], [-1, -1], [2, 0], [0, 2]], device=place.device)
    slots, positions, _, ends = ops.moe_align(ids, 3, backend=place.backend)
    y = ops.moe_permute(x, slots, positions, backend=place.backend)
    kept = int(ends[-1])
    wanted = x[(slots // 2).long()]
    assert torch.equal(y[:kept].view(torch.int16), wanted[:kept].view(torch.int16))
    assert not y[kept:].any()


@everywhere
def test_the_gradient_adds_in_the_order_of_the_experts(place):
    """In float32, rounded once: 256 + 1 + 1 is 258 in bfloat16, and would be 256 if each sum was rounded."""
    x = torch.zeros(1, 8, dtype=torch.bfloat16, device=place.device, requires_grad=True)
    ids = torch.tensor([[2, 0, 1]], device=place.device)
    slots, positions, *_ = ops.moe_align(ids, 3, backend=place.backend)
    y = ops.moe_permute(x, slots, positions, backend=place.backend)
    dy = torch.tensor([1.0, 1.0, 256.0], device=place.device)[:, None].expand(3, 8).bfloat16()
    (dx,) = torch.autograd.grad(y, x, dy.contiguous())
    assert dx.float().tolist() == [[258.0] * 8]
