"""top_k: a stable sort's first k."""

import pytest
import torch
from tests.ops.sampling.places import everywhere_and_in_cuda

from tilewright import ops
from tilewright.errors import RefusedError


@everywhere_and_in_cuda
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 7), (513, 1), (600, 64), (5000, 3), (3000, 256)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_it_is_a_stable_sort(n, k, dtype, place):
    x = (torch.randn(3, n) * 20).round().to(device=place.device, dtype=dtype)  # many equals, zeros of both signs
    values, indices = ops.top_k(x, k, backend=place.backend)
    wanted = [sorted(range(n), key=lambda i, row=row: (-row[i], i))[:k] for row in x.tolist()]
    assert indices.tolist() == wanted
    assert torch.equal(values.view(torch.uint8), x.gather(1, indices).view(torch.uint8))


@everywhere_and_in_cuda
def test_nan_is_the_largest(place):
    x = torch.tensor([[1.0, -torch.inf, torch.nan, torch.inf, -torch.nan]], device=place.device)
    assert ops.top_k(x, 5, backend=place.backend)[1].tolist() == [[2, 4, 3, 0, 1]]


def test_nan_is_the_largest_where_torch_sorts_bits(monkeypatch):
    """As on a GPU, where a NaN with a sign bit is the least."""
    sort = torch.Tensor.sort

    def by_bits(x, **options):
        bits = x.view(torch.int32)
        return sort(bits ^ ((bits >> 31) & 0x7FFFFFFF), **options)

    x = torch.tensor([[1.0, -torch.inf, torch.nan, torch.inf, -torch.nan]])
    x.view(torch.int32)[0, 4] = -1  # torch may have dropped the sign
    monkeypatch.setattr(torch.Tensor, "sort", by_bits)
    values, indices = ops.top_k(x, 5, backend="torch")
    assert indices.tolist() == [[2, 4, 3, 0, 1]]
    assert values.view(torch.int32)[0, 1] == -1


@pytest.mark.interp
def test_the_kernel_says_what_it_takes():
    with pytest.raises(RefusedError, match="takes k up to 256"):
        ops.top_k(torch.zeros(1, 400), 300, backend="triton")
