"""Routers and experts of transformers' models, small and random."""

import torch
from torch import nn


def normal(module: nn.Module, scale: float = 0.5) -> nn.Module:
    """The module with normal parameters and buffers."""
    with torch.no_grad():
        for t in (*module.parameters(), *module.buffers()):
            t.normal_(0, scale)
    return module


def same_choice(ours, theirs, weights, expected):
    """The same experts in every row, in any order, and their weights within some roundings."""
    a, b = ours.sort(-1), theirs.sort(-1)
    assert torch.equal(a.values, b.values)
    torch.testing.assert_close(weights.gather(1, a.indices), expected.gather(1, b.indices), rtol=1e-6, atol=0)
