"""Tensors of the cases of `sanitize_cases.py`, and when a result is right."""

import torch
from torch import Tensor

DEVICE = torch.device("cuda", 0)
UNWRITTEN = 768.0  # bf16 has it
HALF = torch.bfloat16


def near(found: Tensor, exact: Tensor, bound: float = 5e-3) -> bool:
    """True if the norm of the error is below `bound` of that of `exact`."""
    return bool((found.double() - exact).norm() < bound * exact.norm())


def drawn(*shape: int, dtype: torch.dtype = HALF, turned: bool = False) -> Tensor:
    """Normal numbers; turned: the last two dimensions swapped in memory."""
    if turned:
        return drawn(*shape[:-2], shape[-1], shape[-2], dtype=dtype).mT
    return torch.randn(shape, device=DEVICE).to(dtype)


def unwritten(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    """Memory that holds a number which no product gives."""
    return torch.full(shape, UNWRITTEN, dtype=dtype, device=DEVICE)
