"""Sizes, inputs and comparisons of the tests of attention layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.mask import Mask
from tilewright.nn import Attention, DifferentialAttention

HIDDEN, HEADS, KV_HEADS, D = 32, 4, 2, 16
BATCH, TOKENS = 2, 11
Maker = Callable[..., Attention | DifferentialAttention]


def randomised(module: nn.Module) -> nn.Module:
    """Scores of order 1, so that every key matters; lambda away from 1, where the first token's values cancel."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            spread = HIDDEN**-0.5 if name.endswith("proj.weight") else 0.1 if "lambda" in name else 0.5
            parameter.normal_(std=spread)
    return module


def run(module: nn.Module, x: Tensor, cotangent: Tensor, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """The result and every gradient, by name."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    made = module(x, *args, **kwargs)
    y = made[0] if isinstance(made, tuple) else made
    y.backward(cotangent)
    found = {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}
    assert all(isinstance(t, Tensor) for t in found.values())
    return found


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        torch.testing.assert_close(got[name], wanted, rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


def assert_as_exact(got: dict[str, Tensor], peers: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """The library's rule: twice the peer's error, three times in gradients, and a small floor.

    Not for vectors, whose gradients are sums over all tokens with terms that cancel: float32 judges them.
    """
    for name, wanted in exact.items():
        if wanted.dim() > 1:
            error, allowed = (float((found[name] - wanted).norm() / wanted.norm()) for found in (got, peers))
            assert error <= (2 if name == "y" else 3) * allowed + 2e-3, name


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, TOKENS, HIDDEN, dtype=dtype), torch.randn(BATCH, TOKENS, HIDDEN, dtype=dtype)


def additive(seen: Mask, dtype: torch.dtype = torch.float32) -> Tensor:
    allowed = seen.dense(BATCH, 1, TOKENS, TOKENS)
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
