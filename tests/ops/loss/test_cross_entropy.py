"""cross_entropy: torch's loss and gradient for every option and reduction, and what torch gives for odd numbers."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from tests.ops.sampling.places import everywhere

from tilewright import ops
from tilewright.errors import InputError
from tilewright.ops.loss.in_place import scaled

OPTIONS = {
    "plain": {},
    "smooth": {"label_smoothing": 0.1},
    "weights": {"weight": True},
    "both": {"label_smoothing": 0.3, "weight": True},
    "another_index": {"ignore_index": 2},
}
REDUCTIONS = ("mean", "sum", "none")


def both(x, target, options, **ours):
    """(our loss, its gradient), (torch's in float64)."""
    made = []
    for function, dtype, more in ((ops.cross_entropy, x.dtype, ours), (F.cross_entropy, torch.float64, {})):
        given = {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        leaf = x.to(dtype).requires_grad_()
        loss = function(leaf, target, **given, **more)
        dloss = torch.linspace(0.5, 2.0, max(loss.numel(), 1), dtype=loss.dtype, device=x.device)
        (dx,) = torch.autograd.grad(loss, leaf, dloss.view(loss.shape))
        made.append((loss.double(), dx.double()))
    return made


@everywhere
@pytest.mark.parametrize(("name", "reduction"), list(itertools.product(OPTIONS, REDUCTIONS)))
def test_torchs_loss_and_gradient(name, reduction, place):
    x = 3 * torch.randn(6, 37, device=place.device)
    target = torch.randint(0, 37, (6,), device=place.device)
    options = dict(OPTIONS[name], reduction=reduction)
    target[1] = target[4] = options.get("ignore_index", -100)
    if options.get("weight"):
        options["weight"] = 0.1 + torch.rand(37, device=place.device)
    ours, theirs = both(x, target, options, backend=place.backend)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@everywhere
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nothing_but_ignored_rows(reduction, place):
    x, target = torch.randn(3, 16, device=place.device), torch.full((3,), -100, device=place.device)
    ours, theirs = both(x, target, {"reduction": reduction}, backend=place.backend)
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@everywhere
def test_infinities_and_nan(place):
    inf, nan = torch.inf, torch.nan
    x = torch.tensor(
        [[-inf, 1, 2], [0, -inf, 2], [inf, 1, 2], [nan, 1, 2], [-inf] * 3, [1, inf, inf]], device=place.device
    )
    target = torch.tensor([0, 0, 1, 1, 0, 1], device=place.device)
    ours, theirs = both(x, target, {"reduction": "none"}, backend=place.backend)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


@everywhere
def test_softcap_and_z_loss_by_their_formulas(place):
    x = (8 * torch.randn(2, 5, 40, device=place.device)).requires_grad_()
    target = torch.randint(0, 40, (2, 5), device=place.device)
    target[0, 3] = -100
    capped = 10 * torch.tanh(x.double() / 10)
    z = 0.01 * capped.logsumexp(-1)[target != -100].square().mean()
    wanted = F.cross_entropy(capped.flatten(0, 1), target.flatten()) + z
    options = {"softcap": 10.0, "z_loss": 0.01, "return_z_loss": True, "backend": place.backend}
    loss, made_z = ops.cross_entropy(x, target, **options)
    torch.testing.assert_close(loss.double(), wanted)
    torch.testing.assert_close(made_z.double(), z)
    for ours, theirs in ((loss, wanted), (made_z, z)):
        torch.testing.assert_close(
            *(torch.autograd.grad(t, x, retain_graph=True)[0] for t in (ours, theirs)), rtol=1e-4, atol=1e-7
        )


@everywhere
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("n", [48, 51])
def test_the_gradient_over_the_logits(reduction, n, place):
    leaf = torch.randn(4, n, device=place.device, requires_grad=True)
    target = torch.tensor([0, n - 1, -100, 3], device=place.device)
    logits = leaf * 2
    loss = ops.cross_entropy(
        logits, target, reduction=reduction, label_smoothing=0.1, inplace_grad=True, backend=place.backend
    )
    wanted = F.cross_entropy(leaf * 2, target, reduction=reduction, label_smoothing=0.1)
    torch.testing.assert_close(loss, wanted)
    (gradient,) = torch.autograd.grad(wanted * 3, leaf, retain_graph=True)
    torch.testing.assert_close(2 * 3 * logits.detach(), gradient)
    for _ in range(2):  # a graph that is kept has its gradient still
        torch.testing.assert_close(torch.autograd.grad(loss * 3, leaf, retain_graph=True)[0], gradient)
    torch.testing.assert_close(torch.autograd.grad(loss * 3, leaf)[0], gradient)


def test_who_saved_the_logits_learns_of_the_write():
    leaf = torch.randn(4, 8, requires_grad=True)
    logits = leaf.exp()  # whose backward reads its result
    loss = ops.cross_entropy(logits, torch.zeros(4, dtype=torch.int64), inplace_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_cannot_be_written_over():
    target, leaf = torch.zeros(4, dtype=torch.int64), torch.randn(4, 8, requires_grad=True)
    with pytest.raises(InputError, match="a leaf"):
        ops.cross_entropy(leaf, target, inplace_grad=True)
    with pytest.raises(InputError, match="reduction='none'"):
        ops.cross_entropy(leaf * 1, target, reduction="none", inplace_grad=True)
    with pytest.raises(InputError, match="unit stride"):
        ops.cross_entropy((leaf.view(8, 4) * 1).t(), target, inplace_grad=True)
    with pytest.raises(InputError, match="return_z_loss"):
        ops.cross_entropy(leaf * 1, target, return_z_loss=True, inplace_grad=True)
    loss = ops.cross_entropy(leaf * 1, target, inplace_grad=True)
    with pytest.raises(InputError, match="no gradient of its gradient"):
        torch.autograd.grad(loss, leaf, create_graph=True)
    untouched = leaf.detach().clone()
    ops.cross_entropy(untouched, target, inplace_grad=True)  # no gradient is wanted
    assert torch.equal(untouched, leaf)


def test_a_class_that_does_not_exist():
    with pytest.raises(InputError, match="target has 8; needs 0 to 7, or -100"):
        ops.cross_entropy(torch.randn(2, 8), torch.tensor([1, 8]))


def test_one_graph():
    leaf, target = torch.randn(4, 8, requires_grad=True), torch.tensor([1, 2, -100, 3])
    step = torch.compile(
        lambda x: ops.cross_entropy(x * 1, target, label_smoothing=0.1, inplace_grad=True),
        fullgraph=True,
        backend="aot_eager",
    )
    loss, wanted = step(leaf), F.cross_entropy(leaf, target, label_smoothing=0.1)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(t, leaf)[0] for t in (loss, wanted)))


def test_a_gradient_that_lies_transposed_is_multiplied_elsewhere():
    """The kernel in place takes rows side by side; torch's gradient of a weight may lie along its columns."""
    gradient = torch.randn(6, 4).T
    before = gradient.clone()
    product = scaled(gradient, torch.tensor(2.0))
    torch.testing.assert_close(product, 2 * before, rtol=0, atol=0)
    assert torch.equal(gradient, before)
