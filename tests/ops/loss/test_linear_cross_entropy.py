"""linear_cross_entropy: torch's loss and gradients, one chunk of logits at a time, and no memory beside it."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright import ops
from tilewright.ops.loss.linear import chunks

OPTIONS = {
    "plain": {},
    "smooth": {"label_smoothing": 0.2},
    "class_weights": {"class_weight": 0.1 + torch.arange(30) / 30},
}


def problem(bias=True):
    hidden, weight = torch.randn(11, 12, requires_grad=True), torch.randn(30, 12, requires_grad=True)
    target = torch.randint(0, 30, (11,))
    target[::4] = -100
    return hidden, weight, target, torch.randn(30, requires_grad=True) if bias else None


@pytest.mark.parametrize("chunk_rows", [None, 4, 1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_torchs_loss_and_gradients(name, reduction, chunk_rows):
    hidden, weight, target, bias = problem()
    loss = ops.linear_cross_entropy(
        hidden, weight, target, bias, reduction=reduction, chunk_rows=chunk_rows, **OPTIONS[name]
    )
    options = dict(OPTIONS[name])
    options["weight"] = options.pop("class_weight", None)
    wanted = F.cross_entropy(F.linear(hidden, weight, bias), target, reduction=reduction, **options)
    torch.testing.assert_close(loss, wanted)
    dloss = torch.rand_like(loss)
    leaves = hidden, weight, bias
    theirs = torch.autograd.grad(wanted, leaves, dloss)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(loss, leaves, dloss, retain_graph=True), theirs)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves, dloss), theirs)


def test_gradients_that_are_not_wanted():
    hidden, weight, target, _ = problem()
    loss = ops.linear_cross_entropy(hidden, weight.detach(), target, chunk_rows=4)
    wanted = F.cross_entropy(F.linear(hidden, weight), target)
    torch.testing.assert_close(*(torch.autograd.grad(t, hidden)[0] for t in (loss, wanted)))


def test_a_graph_of_the_gradient():
    hidden, weight, target, _ = problem()
    made = []
    for loss in (ops.linear_cross_entropy(hidden, weight, target), F.cross_entropy(F.linear(hidden, weight), target)):
        (dhidden,) = torch.autograd.grad(loss, hidden, create_graph=True)
        made.append(torch.autograd.grad(dhidden.square().sum(), weight)[0])
    torch.testing.assert_close(*made)


def test_one_graph():
    hidden, weight, target, bias = problem()
    step = torch.compile(
        lambda *args: ops.linear_cross_entropy(*args, chunk_rows=4), fullgraph=True, backend="aot_eager"
    )
    loss, wanted = step(hidden, weight, target, bias), F.cross_entropy(F.linear(hidden, weight, bias), target)
    torch.testing.assert_close(loss, wanted)
    leaves = hidden, weight, bias
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(wanted, leaves))


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an op makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (tuple, list)) else (result,)
        for t in made:
            if isinstance(t, torch.Tensor):
                self.bytes = max(self.bytes, t.numel() * t.element_size())
        return result


def test_all_logits_never_exist():
    """The gradients are smaller than two rows of logits here: what is larger than a chunk would be logits."""
    hidden, weight = torch.randn(64, 2, requires_grad=True), torch.randn(1000, 2, requires_grad=True)
    target = torch.randint(0, 1000, (64,))
    chunk = 4 * 1000 * 4
    with Largest() as seen:
        ops.linear_cross_entropy(hidden, weight, target, chunk_rows=4).backward()
    assert 0 < seen.bytes <= chunk
    with Largest() as seen:
        ops.linear_cross_entropy(hidden, weight, target, chunk_rows=4, reduction="none").sum().backward()
    assert 0 < seen.bytes <= chunk


@pytest.mark.parametrize(("m", "classes"), [(4096, 128256), (1, 128256), (8192, 32000), (5000, 151936), (300, 1 << 30)])
def test_chunks_fit(m, classes):
    size = chunks.rows_of_chunk(m, classes, 2)
    assert 1 <= size <= m
    assert size * classes * 2 <= chunks.CHUNK_BYTES or size == 1
    fewest = -(-m * classes * 2 // chunks.CHUNK_BYTES)
    assert -(-m // size) <= 2 * fewest
