"""Shared by the ops of this family: outputs of a cast, the granularity of scales by their shape, checks."""

import torch
from torch import Tensor

from tilewright.dispatch.raw import OutputSpec
from tilewright.errors import InputError
from tilewright.ops.quant.layout import BLOCK, ROW, TENSOR, TOKEN, TOKEN_UE8M0, ScaleLayout
from tilewright.ops.quant.numbers import E4M3

SOURCES = (torch.bfloat16, torch.float16, torch.float32)

CHANNEL = ScaleLayout(128, 1, along_rows=False)
"""128 elements of one column: TOKEN of the transpose."""

GRANULARITIES = (TENSOR, ROW, TOKEN, BLOCK, CHANNEL, TOKEN_UE8M0)
"""`granularity` tries them in this order; two fit only a matrix so small that they mean the same."""


def pair(shape: tuple[int, ...], layout: ScaleLayout) -> tuple[OutputSpec, OutputSpec]:
    """Output specs of q (*batch, rows, depth) and its scales."""
    *batch, rows, depth = shape
    scales = layout.empty(rows, depth, "meta", *batch)
    return (shape, E4M3), (tuple(scales.shape), layout.dtype, scales.stride())


def granularity(q: Tensor, scales: Tensor) -> ScaleLayout | None:
    """Layout whose shape `scales` have for q (..., R, K), or None.

    Strides are free.  One scale (1, 1) may serve a q of any dimensions.
    """
    rows, depth = q.shape[-2:]
    if tuple(scales.shape) == (1, 1) and scales.dtype.is_floating_point:
        return TENSOR
    if scales.shape[:-2] != q.shape[:-2]:
        return None
    packed = scales.dtype == torch.int32
    fits = (g for g in GRANULARITIES if (g.dtype == torch.int32) == packed)
    return next((g for g in fits if tuple(scales.shape[-2:]) == g.shape(rows, depth)), None)


def check_matrix(op: str, x: Tensor, *, form: str = "(..., M, K)") -> None:
    """x is a bf16, fp16 or fp32 tensor of at least two dimensions that requires no gradient."""
    if not isinstance(x, Tensor):
        raise InputError(f"{op}: x is a {type(x).__name__}; needs a torch.Tensor.")
    if x.dtype not in SOURCES:
        raise InputError(f"{op}: x is {x.dtype}; needs one of bfloat16, float16, float32. Cast it first.")
    if x.dim() < 2:
        raise InputError(f"{op}: x is {tuple(x.shape)}; needs {form}. Unsqueeze a vector.")
    check_no_gradient(op, x)


def check_no_gradient(op: str, *tensors: Tensor) -> None:
    """Rounding to 8 bits has no useful gradient; a silent zero would stop training."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise InputError(f"{op}: a gradient is wanted, and 8-bit numbers have none. Detach x, or use torch.no_grad().")
