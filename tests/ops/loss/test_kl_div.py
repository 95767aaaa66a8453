"""kl_div: torch's loss and gradient for every option, and what torch gives for odd numbers."""

import pytest
import torch
import torch.nn.functional as F
from tests.ops.sampling.places import everywhere

from tilewright import ops
from tilewright.errors import InputError


def theirs_of(x, target, reduction, **options):
    """torch's loss, without its warning that "mean" is that of elements."""
    if reduction == "mean":
        return F.kl_div(x, target, reduction="none", **options).mean()
    return F.kl_div(x, target, reduction=reduction, **options)


def both(x, target, **options):
    """(our loss, its gradient), (torch's in float64)."""
    backend = options.pop("backend")
    made = []
    for function, dtype, more in ((ops.kl_div, x.dtype, {"backend": backend}), (theirs_of, torch.float64, {})):
        leaf = x.to(dtype).requires_grad_()
        loss = function(leaf, target.to(dtype), **options, **more)
        dloss = torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype, device=x.device)
        (dx,) = torch.autograd.grad(loss, leaf, dloss.view(loss.shape))
        made.append((loss.double(), dx.double()))
    return made


@everywhere
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "batchmean", "sum", "none"])
def test_torchs_loss_and_gradient(reduction, log_target, place):
    x, y = (F.log_softmax(2 * torch.randn(2, 3, 37, device=place.device), -1) for _ in range(2))
    ours, theirs = both(
        x, y if log_target else y.exp(), reduction=reduction, log_target=log_target, backend=place.backend
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@everywhere
@pytest.mark.parametrize("log_target", [False, True])
def test_infinities_and_nan(log_target, place):
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([-1.0, -inf, -inf, nan, -1.0, inf, -1.0, -2.0], device=place.device)
    target = torch.tensor([0.0, 0.5, 0.0, 0.5, nan, 0.5, -inf if log_target else -0.5, inf], device=place.device)
    ours, theirs = both(x, target, reduction="none", log_target=log_target, backend=place.backend)
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@everywhere
@pytest.mark.parametrize("largest", [0.4, 0.9])
def test_probabilities_from_the_least_to_the_largest(largest, place):
    """Also those that float32 holds with fewer bits, whose inverse is no float32; and 0."""
    target = torch.tensor([1e-44, 3e-39, 2e-38, 1e-20, 1e-4, 0.1, largest, 0.0], device=place.device)
    x = torch.full_like(target, -2.0)
    ours = ops.kl_div(x, target, reduction="none", backend=place.backend)
    theirs = F.kl_div(x.double(), target.double(), reduction="none")
    torch.testing.assert_close(ours.double()[2:], theirs[2:], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(ours.double()[:2], theirs[:2], rtol=0.2, atol=0.0)


def test_derivatives_of_the_reference():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    target = torch.rand(3, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda t: ops.kl_div(t, target), x, check_forward_ad=True)


def test_a_target_that_requires_a_gradient():
    with pytest.raises(InputError, match=r"target requires a gradient and has none"):
        ops.kl_div(torch.randn(2, 8), torch.rand(2, 8, requires_grad=True))
