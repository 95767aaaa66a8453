"""Our `Function.apply`: torch's, but for what it does to the arguments by inspection."""

import inspect

import torch

from tilewright.dispatch.derivatives import Function

X = torch.randn(3, 4)


class Scaled(Function):
    @staticmethod
    def forward(x, factor):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def vmap(info, in_dims, x, factor):
        return Scaled.apply(x, factor), in_dims[0]

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.factor, None


def test_it_inspects_nothing(monkeypatch):
    monkeypatch.setattr(inspect, "signature", None)
    x = X.clone().requires_grad_()
    y = Scaled.apply(x, 3.0)
    assert torch.equal(y, 3 * X)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full_like(X, 3))


def test_functorch_transforms_see_it():
    assert torch.equal(torch.func.grad(lambda x: Scaled.apply(x, 3.0).sum())(X), torch.full_like(X, 3))
    assert torch.equal(torch.func.vmap(lambda x: Scaled.apply(x, 3.0))(X), 3 * X)


def test_a_tensor_that_outlived_its_transform_is_an_input_like_another():
    kept = []
    torch.func.grad(lambda x: kept.append(x) or x.sum())(X)
    assert torch.equal(Scaled.apply(kept[0], 3.0), 3 * X)
