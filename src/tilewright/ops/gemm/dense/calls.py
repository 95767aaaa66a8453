"""Converts the arguments of a public product to those of its raw op."""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Contract, call
from tilewright.ops.gemm.activation import activated
from tilewright.ops.gemm.dense.checks import FP8
from tilewright.ops.gemm.operands import unit_stride


def arguments(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    activation: str | None,
    c: Tensor | None,
    alpha: float | Tensor,
    out_dtype: torch.dtype | None,
) -> tuple[Any, ...]:
    """Returns the arguments of the raw op: transposed already, with a unit stride among the last two of a, b and c."""
    scale, factor = (alpha, 1.0) if isinstance(alpha, Tensor) else (None, alpha)
    if isinstance(factor, int):
        factor = float(factor)
    if out_dtype is None:
        out_dtype = torch.bfloat16 if a.dtype == FP8 else a.dtype
    if isinstance(c, Tensor) and c.dim() > 1 and c.stride(-1) != 1:
        c = c.contiguous()
    if isinstance(bias, Tensor):
        bias = bias.contiguous()
    return unit_stride(a), unit_stride(b), bias, c, scale, factor, activation or "", out_dtype


def wants_activation_gradient(args: tuple[Any, ...]) -> bool:
    """Returns whether a gradient has to pass through the activation of this call."""
    return (
        args[6] != "" and torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in args[:4])
    )


def differentiated(contract: Contract, args: tuple[Any, ...], backend: str | None) -> Tensor:
    """Runs the product without activation and c, then these as a separate step with a gradient."""
    a, b, bias, c, scale, alpha, activation, out_dtype = args
    with torch.no_grad():
        contract.check(*args)  # the call below has neither the activation nor c
    z = call(contract, (a, b, bias, None, scale, alpha, "", out_dtype), backend)
    return activated(z, c, activation)
