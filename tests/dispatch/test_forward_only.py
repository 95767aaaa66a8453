"""A backend with a forward kernel and no backward: when it is used under autograd, and what the backward then runs."""

import pytest
import torch

from tilewright import ops
from tilewright.dispatch import contract, register_impl
from tilewright.dispatch.call import _run
from tilewright.dispatch.registry import unregister_impl


@pytest.fixture
def forwards():
    """Calls of a forward-only backend that stands first in `auto`'s order."""
    calls = []

    @register_impl("layer_norm", backend="forward_only")
    def launch(outs, x, weight, bias, eps, *, config):
        calls.append(x.shape)
        outs[0].copy_(torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps))

    yield calls
    unregister_impl("layer_norm", backend="forward_only")


def problem(requires_grad):
    x, weight, bias = torch.randn(4, 6), torch.randn(6), torch.randn(6)
    return [t.requires_grad_(requires_grad) for t in (x, weight, bias)]


def test_it_runs_where_nothing_needs_a_gradient(forwards):
    ops.layer_norm(*problem(False))
    assert len(forwards) == 1


def test_auto_takes_the_reference_and_its_own_gradient_where_something_does(forwards):
    args = problem(True)
    y = ops.layer_norm(*args)
    assert not forwards
    expected = torch.autograd.grad(torch.nn.functional.layer_norm(args[0], (6,), *args[1:]).sum(), args)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), args), expected)


def test_a_wish_for_it_keeps_the_forward_and_leaves_the_backward_to_others(forwards):
    args = problem(True)
    y = _run(contract("layer_norm"), (*args, 1e-5), "forward_only!", "default")
    assert len(forwards) == 1
    expected = torch.autograd.grad(torch.nn.functional.layer_norm(args[0], (6,), *args[1:]).sum(), args)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), args), expected)


def test_a_signature_is_remembered_with_and_without_a_gradient(forwards, replay_on_cpu):
    for times in range(1, 4):
        assert ops.layer_norm(*problem(True)).requires_grad
        assert not ops.layer_norm(*problem(False)).requires_grad
        assert len(forwards) == times
    contract("layer_norm").forward.forget_plans()
