"""greedy: argmax with the first of equals, and no NaN."""

import pytest
import torch
from tests.ops.sampling.places import everywhere_and_in_cuda

from tilewright import ops


@everywhere_and_in_cuda
@pytest.mark.parametrize("n", [1, 7, 1024, 1025, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_argmax(n, dtype, place):
    x = torch.randn(5, n).to(device=place.device, dtype=dtype)
    assert torch.equal(ops.greedy(x, backend=place.backend), x.float().cpu().argmax(-1).to(place.device))


@everywhere_and_in_cuda
def test_ties_nan_and_nothing(place):
    x = torch.full((6, 3000), -torch.inf, device=place.device)
    x[0, 7], x[0, 2000] = 1.0, 1.0
    x[1, 5], x[1, 2500] = torch.nan, -3.0
    x[2, 9], x[2, 10] = torch.inf, torch.inf
    x[3, 1], x[3, 2] = -0.0, 0.0
    x[4] = torch.nan
    assert ops.greedy(x, backend=place.backend).tolist() == [7, 2500, 9, 1, -1, -1]
