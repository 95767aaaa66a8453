"""Rows of which a part stays in registers between the loss and its gradient, in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

from tilewright.ops.loss.in_place import InPlaceArgs
from tilewright.ops.loss.kernels.triton import cross_entropy_in_place as kernel

pytestmark = pytest.mark.interp


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "held", "warps"), [(700, 1024, 2), (4097, 256, 1), (4096, 1024, 2), (100, 256, 1)])
def test_part_of_a_row_is_held(n, held, warps, dtype):
    x, target = torch.randn(4, n).to(dtype), torch.randint(0, n, (4,))
    weight = torch.rand(n)
    target[1] = -100
    exact = x.double().requires_grad_()
    loss = F.cross_entropy(exact, target, weight.double(), label_smoothing=0.1)
    loss.backward()
    made, lse = torch.empty(()), torch.empty(4)
    args = InPlaceArgs(x, target, weight, None, None, -100, 0.1, 0.0, 0.0, "mean")
    kernel.launch((made, lse), args, kernel.InPlaceConfig(1, warps, 1, held, packed=True))
    torch.testing.assert_close(made.double(), loss.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(x.double(), exact.grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-6)
    assert lse[1] == 0
