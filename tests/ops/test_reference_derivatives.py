"""References with a gradient of their own: second derivatives and forward mode are those of plain torch, in float64."""

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from tilewright import mask, ops

WIDE = torch.float64
MASKS = {
    "all": None,
    "causal": mask.causal(),
    "window": mask.window(1),
    "program": mask.causal() | mask.prefix(2),
    "some queries see nothing": mask.window(3) & mask.document(torch.tensor([0, 0, 1, 2, 2])) & ~mask.prefix(2),
}


def heads(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=WIDE, requires_grad=True)


def attention(options: dict[str, Any], lse: bool):
    """fmha of (q, k, v, sinks), both results."""

    def run(q, k, v, sinks):
        return ops.fmha(q, k, v, sinks=sinks, return_lse=lse, **options)

    return run


@pytest.mark.parametrize("lse", [False, True], ids=["o", "o and lse"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["", "softcap"])
@pytest.mark.parametrize("name", MASKS)
def test_second_derivatives_of_attention(name, softcap, lse):
    options = {"mask": MASKS[name], "softcap": softcap}
    inputs = heads(1, 2, 5, 3), heads(1, 1, 5, 3), heads(1, 1, 5, 2), heads(2)
    assert gradgradcheck(attention(options, lse), inputs)


@pytest.mark.parametrize("name", MASKS)
def test_forward_mode_of_attention(name):
    inputs = heads(1, 2, 5, 3), heads(1, 1, 5, 3), heads(1, 1, 5, 2), heads(2)
    assert gradcheck(attention({"mask": MASKS[name]}, True), inputs, check_forward_ad=True, check_backward_ad=False)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu", "swiglu"])
def test_second_derivatives_of_a_product(activation):
    def run(a, b, bias, c):
        return ops.matmul(a, b, bias=bias, c=c, alpha=0.5, activation=activation)

    wide = 4 if activation != "swiglu" else 8
    inputs = heads(3, 5), heads(5, wide), heads(wide), heads(3, 4)
    assert gradgradcheck(run, inputs)
    assert gradcheck(run, inputs, check_forward_ad=True, check_backward_ad=False)


def test_second_derivatives_where_the_incoming_gradient_is_a_constant():
    """`create_graph` with a constant: the gradient of an operand still depends on the other."""
    q, k, v = (torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3))
    a, b = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    for results, inputs in ((ops.fmha(q, k, v), (q, k, v)), (ops.matmul(a, b, activation="silu"), (a, b))):
        gradients = torch.autograd.grad(results, inputs, torch.ones_like(results), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in gradients), inputs)
        assert all(g.norm() > 0 for g in second)


def test_forward_over_reverse_is_reverse_over_reverse():
    """Products of the Hessian with a vector, both ways."""
    q, k, v, u = (torch.randn(1, 1, 4, 8, dtype=WIDE) for _ in range(4))

    def loss(q):
        return ops.fmha(q, k, v, causal=True).square().sum()

    x = q.clone().requires_grad_()
    (dx,) = torch.autograd.grad(loss(x), x, create_graph=True)
    (wanted,) = torch.autograd.grad(dx, x, u)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q.clone().requires_grad_(), u)
        made = forward_ad.unpack_dual(torch.autograd.grad(loss(dual), dual)[0]).tangent
    torch.testing.assert_close(made, wanted)
    made = torch.func.jvp(torch.func.grad(loss), (q,), (u,))[1]
    torch.testing.assert_close(made, wanted)
