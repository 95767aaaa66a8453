"""Float8 operands with scales, and the float64 values that they stand for, for the tests of this folder."""

import torch

from tilewright.ops.quant import numbers
from tilewright.ops.quant.layout import BLOCK, TOKEN, ScaleLayout

Operand = tuple[torch.Tensor, torch.Tensor]


def operand(shape: tuple[int, ...], layout: ScaleLayout, seed: int) -> tuple[Operand, torch.Tensor]:
    """((q, scales), values in float64); magnitudes differ by orders from row to row and block to block, so that a scale
    of a neighbour gives another result.
    """
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp(2 * torch.randn(*shape[:-1], 1, generator=g))
    blocks = torch.exp(torch.randn(*shape[:-2], 1, -(-shape[-1] // 128), generator=g))
    x = x * blocks.repeat_interleave(128, -1)[..., : shape[-1]]
    q, scales = numbers.cast(x, layout)
    return (q, scales), numbers.restore(q.double(), scales.double(), layout, torch.float64)


def token(*shape: int, seed: int = 1) -> tuple[Operand, torch.Tensor]:
    """Scales of 128 elements of a row."""
    return operand(shape, TOKEN, seed)


def block(*shape: int, seed: int = 2) -> tuple[Operand, torch.Tensor]:
    """Scales of 128x128 elements."""
    return operand(shape, BLOCK, seed)


def assert_rounded(d: torch.Tensor, exact: torch.Tensor) -> None:
    """d is `exact` up to float32 sums, whose error goes with the largest of a row, and one rounding to d's dtype."""
    relative = 2**-8 if d.dtype == torch.bfloat16 else 1e-6
    bound = relative * exact.abs() + 1e-5 * exact.abs().amax(-1, keepdim=True)
    assert ((d.double() - exact).abs() <= bound).all()
