"""Loss modules against torch.nn's: same state_dict, same numbers, same gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright import ops
from tilewright.errors import InputError
from tilewright.nn import CrossEntropyLoss, LinearCrossEntropyLoss, Softmax, Sparsemax

C, H = 11, 16
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1, "ignore_index": 3},
    "weighted": {"weight": torch.rand(C)},
}


def targets(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, C, shape)


def agree(ours: nn.Module, theirs: nn.Module, x: Tensor, target: Tensor) -> None:
    xs = [x.clone().requires_grad_() for _ in range(2)]
    got, expected = (module(each, target) for module, each in zip((ours, theirs), xs, strict=True))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected.float())
    cotangent = torch.rand_like(got)
    got.backward(cotangent)
    expected.backward(cotangent.to(expected.dtype))
    for g, e in zip([xs[0], *ours.parameters()], [xs[1], *theirs.parameters()], strict=True):
        torch.testing.assert_close(g.grad, e.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(C,), (6, C), (3, C, 4, 2)], ids=["one", "rows", "planes"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_cross_entropy(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    ours, theirs = CrossEntropyLoss(**options), nn.CrossEntropyLoss(**options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    without = shape[:1] + shape[2:] if len(shape) > 1 else ()
    agree(ours, theirs, torch.randn(shape), targets(without))


class Separate(nn.Module):
    """torch's modules one after the other, with the names of torch.nn.LinearCrossEntropyLoss."""

    def __init__(self, bias: bool, softcap: float | None, **options: Any) -> None:
        super().__init__()
        self.linear, self.softcap, self.loss = nn.Linear(H, C, bias), softcap, nn.CrossEntropyLoss(**options)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.linear(x)
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        loss: Tensor = self.loss(logits.flatten(0, -2), target.flatten())
        return loss.view(target.shape) if self.loss.reduction == "none" else loss


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_linear_cross_entropy(options: dict[str, Any]) -> None:
    theirs = Separate(bias=True, softcap=2.0, **options)
    ours = LinearCrossEntropyLoss(H, C, bias=True, softcap=2.0, **options)
    ours.linear.load_state_dict(theirs.linear.state_dict())
    agree(ours, theirs, torch.randn(2, 3, H), targets((2, 3)))


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="since torch 2.13")
def test_linear_cross_entropy_has_torchs_names() -> None:
    options: dict[str, Any] = {"bias": True, "weight": torch.rand(C), "label_smoothing": 0.1}
    ours, theirs = LinearCrossEntropyLoss(H, C, **options), nn.LinearCrossEntropyLoss(H, C, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    agree(ours, theirs, torch.randn(5, H), targets((5,)))


def test_a_tied_head_under_autocast() -> None:
    embedding, head = nn.Embedding(C, H), LinearCrossEntropyLoss(H, C)
    head.linear.weight = embedding.weight
    ids = targets((2, 4))
    with torch.autocast("cpu", torch.bfloat16):
        loss = head(embedding(ids), ids)
        logits = F.linear(embedding(ids), embedding.weight)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(loss, F.cross_entropy(logits.float().flatten(0, 1), ids.flatten()))
    loss.backward()
    assert embedding.weight.grad is not None and embedding.weight.grad.dtype == torch.float32


def test_probabilities_are_refused() -> None:
    with pytest.raises(InputError, match="needs class indices"):
        CrossEntropyLoss()(torch.randn(2, C), torch.rand(2, C))


def test_options_are_shown() -> None:
    assert "reduction='mean', softcap=30.0" in repr(LinearCrossEntropyLoss(H, C, softcap=30.0))


@pytest.mark.parametrize("dim", [-1, 1])
def test_softmax(dim: int) -> None:
    x = torch.randn(3, 5, 7)
    torch.testing.assert_close(Softmax(dim)(x), nn.Softmax(dim)(x))


def test_sparsemax() -> None:
    x = torch.randn(3, 5, 7)
    assert torch.equal(Sparsemax(1)(x), ops.sparsemax(x, 1))
    assert repr(Sparsemax(1)) == "Sparsemax(dim=1)"
