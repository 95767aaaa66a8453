"""Backward passes that are wrong in one way each."""

from typing import Any

import torch
from tests.validate.broken.planted import correct_backward, fault
from torch import Tensor


@fault("backward", direction="bwd", fools_allclose=False)
def zero_gradient(outs: tuple[Tensor, Tensor], *args: Any, config: None) -> None:
    """The weight gets no gradient; the model trains, only worse."""
    correct_backward(outs, *args, config=config)
    outs[1].zero_()


@fault("backward", direction="bwd", fools_allclose=True, params={"M": 192, "N": 256, "scale": 100.0})
def dropped_term(
    outs: tuple[Tensor, Tensor], dy: Tensor, x: Tensor, weight: Tensor, eps: float, *args: Any, config: None
) -> None:
    """dx without its projection on x: nearly right, and small beside an absolute tolerance when x is large."""
    correct_backward(outs, dy, x, weight, eps, *args, config=config)
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    outs[0].copy_(dy * weight * rstd)


@fault("gradient_subsets", direction="bwd", fools_allclose=True)
def assumed_dense_cotangent(outs: tuple[Tensor, Tensor], dy: Tensor, *args: Any, config: None) -> None:
    """dy is read as if it were contiguous; `.sum().backward()` hands in one number with stride 0."""
    correct_backward(outs, dy.as_strided(dy.shape, (dy.shape[-1], 1)), *args, config=config)


@fault("inputs_unchanged", direction="bwd", fools_allclose=True)
def reused_cotangent(outs: tuple[Tensor, Tensor], dy: Tensor, *args: Any, config: None) -> None:
    """dx is computed in dy's memory, which a later node of the graph may still read."""
    correct_backward(outs, dy, *args, config=config)
    dy.copy_(outs[0])


@fault("determinism", direction="bwd", fools_allclose=True)
def atomic_weight_gradient(outs: tuple[Tensor, Tensor], *args: Any, config: None) -> None:
    """The weight gradient is summed in an order that changes from run to run."""
    correct_backward(outs, *args, config=config)
    if outs[1].numel():
        outs[1].view(torch.int16)[0] += (torch.rand(()) > 0.5).short()  # one bf16 step
