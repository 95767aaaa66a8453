"""apply_penalties: vLLM's formulas in their order."""

import torch
from tests.ops.sampling.places import everywhere
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright import ops


class Divisors(TorchDispatchMode):
    """What torch divides by."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.div.Tensor, torch.ops.aten.div.Scalar):
            self.found.append(args[1])
        return func(*args, **(kwargs or {}))


@everywhere
def test_each_penalty(place):
    x = torch.tensor([[2.0, -2.0, 1.0, 0.5]], device=place.device)
    counts = torch.tensor([[3, 1, 0, 0]], dtype=torch.int32, device=place.device)
    prompt = torch.tensor([[False, False, True, False]], device=place.device)
    call = lambda **options: ops.apply_penalties(x, counts, **options, backend=place.backend).tolist()  # noqa: E731
    assert call() == [[2.0, -2.0, 1.0, 0.5]]
    assert call(repetition=2.0) == [[1.0, -4.0, 1.0, 0.5]]
    assert call(repetition=2.0, prompt=prompt) == [[1.0, -4.0, 0.5, 0.5]]
    assert call(presence=0.5, prompt=prompt) == [[1.5, -2.5, 1.0, 0.5]]
    assert call(frequency=0.25) == [[1.25, -2.25, 1.0, 0.5]]
    bias = torch.tensor([[0.0, 1.0, -torch.inf, 0.0]], device=place.device)
    assert call(bias=bias) == [[2.0, -1.0, -torch.inf, 0.5]]


@everywhere
def test_a_tensor_has_one_penalty_a_row(place):
    x = torch.randn(3, 3000, device=place.device)
    counts = torch.randint(0, 3, (3, 3000), dtype=torch.int32).to(place.device)
    values = [1.2, 1.0, 0.8]
    together = ops.apply_penalties(
        x, counts, repetition=torch.tensor(values, device=place.device), presence=0.5, backend=place.backend
    )
    for i, value in enumerate(values):
        row = slice(i, i + 1)
        alone = ops.apply_penalties(x[row], counts[row], repetition=value, presence=0.5, backend=place.backend)
        assert torch.equal(alone, together[row])


def test_the_reference_divides_by_a_tensor():
    """On a GPU torch multiplies by the reciprocal of a number, which gives other bits."""
    x, counts = torch.randn(2, 5), torch.ones(2, 5, dtype=torch.int32)
    with Divisors() as divisors:
        ops.apply_penalties(x, counts, repetition=1.3, backend="torch")
    assert [d.shape for d in divisors.found] == [(1, 1)]


@everywhere
def test_it_may_write_over_the_logits(place):
    x = torch.randn(2, 100, device=place.device)
    counts = torch.ones(2, 100, dtype=torch.int32, device=place.device)
    wanted = ops.apply_penalties(x, counts, frequency=1.0, backend=place.backend)
    assert ops.apply_penalties(x, counts, frequency=1.0, out=x, backend=place.backend) is x
    assert torch.equal(x, wanted)
