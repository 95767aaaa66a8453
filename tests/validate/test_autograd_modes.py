"""Public functions that are wrong in what autograd makes of them: each is caught by the mode that is there for it."""

from functools import wraps
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor

import tilewright.ops  # noqa: F401 - binds every contract
from tilewright.dispatch import Workload, contract
from tilewright.dispatch.contract import _functions
from tilewright.validate import MODES, check

OP = "rms_norm"
SMALL = Workload("small", {"M": 6, "N": 40})
REFERENCE = contract(OP).reference
AUTOGRAD = ["grad_inputs", "checkpoint", "double_backward", "forward_ad", "negative_bit"]


def gradients(x: Tensor, weight: Tensor, dy: Tensor, **options: Any) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        return torch.autograd.grad(REFERENCE(*leaves, **options), leaves, dy)


class Detached(torch.autograd.Function):
    """Its gradient is right, and a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return REFERENCE(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        return gradients(*ctx.saved_tensors, dy.detach())

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        raise NotImplementedError


class Greedy(Detached):
    """Writes the gradient of a weight that was not asked for."""

    weight: Tensor

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        dx, dweight = gradients(*ctx.saved_tensors, dy)
        Greedy.weight.grad = dweight
        return dx, dweight


class Unpacking(Detached):
    """Takes what it saved out twice, which a checkpoint gives once."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        return gradients(ctx.saved_tensors[0], ctx.saved_tensors[1], dy)


def detached(x: Tensor, weight: Tensor) -> Tensor:
    return Detached.apply(x, weight)


def greedy(x: Tensor, weight: Tensor) -> Tensor:
    Greedy.weight = weight
    return Greedy.apply(x, weight)


def unpacking(x: Tensor, weight: Tensor) -> Tensor:
    return Unpacking.apply(x, weight)


def without_tangents(x: Tensor, weight: Tensor) -> Tensor:
    if forward_mode._current_level >= 0:
        x, weight = (forward_mode.unpack_dual(t).primal for t in (x, weight))
    return REFERENCE(x, weight)


def half_a_tangent(x: Tensor, weight: Tensor) -> Tensor:
    if forward_mode._current_level >= 0:
        weight = forward_mode.unpack_dual(weight).primal
    return REFERENCE(x, weight)


def memory_as_it_is(x: Tensor, weight: Tensor) -> Tensor:
    return REFERENCE(torch._neg_view(x) if x.is_neg() else x, weight)


FAULTS = {
    "grad_inputs": [greedy],
    "checkpoint": [unpacking],
    "double_backward": [detached],
    "forward_ad": [without_tangents, half_a_tangent],
    "negative_bit": [memory_as_it_is],
}


@pytest.fixture
def planted(monkeypatch):
    """Makes a function the public one of rms_norm."""

    def plant(function):
        @wraps(contract(OP).function)
        def public(*args, backend=None, **options):
            return function(*args, **options)

        monkeypatch.setitem(_functions, OP, public)

    return plant


def report(modes, dtype=torch.float32):
    return check(OP, SMALL, modes=modes, backend="torch", dtype=dtype, device="cpu")


@pytest.mark.parametrize(("name", "function"), [(name, f) for name, several in FAULTS.items() for f in several])
def test_a_fault_is_caught_by_its_mode_and_first_gradients_are_right(planted, name, function):
    planted(function)
    assert report(["backward", "gradient_subsets"]).passed
    assert report([name]).failed_modes == (name,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [OP, "swiglu", "softmax", "matmul", "fmha"])
def test_what_is_right_passes(name, dtype):
    for backend in ("torch", None):
        made = check(name, contract(name).edge_cases[0], modes=AUTOGRAD, backend=backend, dtype=dtype, device="cpu")
        assert [r.status for r in made.require().results] == ["passed"] * len(AUTOGRAD), str(made)


def test_the_reference_is_what_a_second_gradient_can_be():
    """Where the reference overflows on its way to a gradient of a gradient, there is nothing to compare with."""
    made = check("swiglu", "saturated", modes=["double_backward"], backend="torch", dtype=torch.float16, device="cpu")
    assert "is not finite in torch.float16" in made.results[0].details[0]


def test_an_op_without_gradients_has_none_of_these():
    name = "per_token_cast_to_fp8"
    made = check(name, contract(name).edge_cases[0], modes=AUTOGRAD[:4], backend="torch", device="cpu")
    assert {r.details for r in made.results} == {("the op has no gradient",)}


def test_gradients_of_gradients_and_forward_mode_are_heavy():
    """They run references, ten times each; the others run the op."""
    assert [name for name in AUTOGRAD if MODES[name].heavy] == ["double_backward", "forward_ad"]
