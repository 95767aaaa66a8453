"""torch.func's transforms over products and attention: gradients in a batch, and gradients of gradients."""

import pytest
import torch

from tilewright import ops

A, B = torch.randn(3, 4, 8, dtype=torch.float64), torch.randn(8, 16, dtype=torch.float64)
BIAS, ENDS = torch.randn(16, dtype=torch.float64), torch.tensor([1, 4], dtype=torch.int32)
STARTS = torch.tensor([0, 1, 4], dtype=torch.int32)


def attention(a):
    q = a.reshape(1, 2, 2, 8)
    return ops.fmha(q, q * 0.5, q + 1.0, causal=True)


def packed(a):
    q = a.reshape(4, 1, 8)
    return ops.fmha_varlen(q, q * 0.5, q + 1.0, STARTS, causal=True)


FUNCTIONS = {
    "product": lambda a: ops.matmul(a, B, bias=BIAS, alpha=2.0),
    "gelu": lambda a: ops.matmul(a, B, activation="gelu"),
    "swiglu": lambda a: ops.matmul(a, B, activation="swiglu"),
    "grouped": lambda a: ops.grouped_matmul(a, torch.stack((B, -B)), ENDS),
    "attention": attention,
    "packed": packed,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_transforms_agree_with_loops(name):
    loss = lambda a: FUNCTIONS[name](a).sin().sum()  # noqa: E731
    gradient = torch.func.grad(loss)
    torch.testing.assert_close(torch.func.vmap(gradient)(A), torch.stack([plain_gradient(loss, a) for a in A]))
    second = torch.func.grad(lambda a: gradient(a).square().sum())
    expected = torch.stack([plain_second(loss, a) for a in A])
    torch.testing.assert_close(torch.func.vmap(second)(A), expected)
    hessian = torch.autograd.functional.hessian(loss, A[0])
    torch.testing.assert_close(torch.func.hessian(loss)(A[0]), hessian)


def plain_gradient(loss, a):
    a = a.clone().requires_grad_()
    return torch.autograd.grad(loss(a), a)[0]


def plain_second(loss, a):
    a = a.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(a), a, create_graph=True)
    return torch.autograd.grad(first.square().sum(), a)[0]
