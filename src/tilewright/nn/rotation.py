"""Rotations of activations and weights (QuaRot, arXiv 2404.00456): outliers of a channel are spread over a block.

With an orthogonal R, (x @ R) @ (W @ R).T is x @ W.T; R is diagonal in blocks, each a symmetric Hadamard matrix divided
by the root of its size.  Where outliers are few, few bits lose less of x @ R and W @ R than of x and W.
"""

import torch
from torch import Tensor

from tilewright.ops.quant.hadamard import largest_block
from tilewright.ops.quant.hadamard_transform import hadamard_transform

_LEAST = 16  # channels of a block; fewer spread nothing


def unrotatable(in_features: int) -> str | None:
    """Why a layer of so many inputs cannot be rotated; None if it can."""
    if in_features > 0 and largest_block(in_features) >= _LEAST:
        return None
    return f"{in_features} inputs; a rotation needs a multiple of {_LEAST}, or of 20, 28 or 36"


def rotate(x: Tensor, backend: str | None = None) -> Tensor:
    """x (..., K) @ R, in x's dtype; its own inverse.   Blocks are the largest that divide K and have a matrix.

    backend: of the transform, if it is one of those that have it ("triton", "torch").
    """
    k = x.shape[-1]
    block = largest_block(k)
    strict = backend if backend in ("triton", "torch") else None
    if block == k:
        result: Tensor = hadamard_transform(x, backend=strict)
        return result
    parts: Tensor = hadamard_transform(x.unflatten(-1, (k // block, block)), backend=strict)
    return parts.flatten(-2)


def rotated_weight(weight: Tensor) -> Tensor:
    """weight (N, K) @ R in float32, from which it is to be quantised: no rounding in between."""
    return rotate(weight.detach().to(torch.float32))
