"""What both CUDA C++ engines ask of their operands, which the copy engine of Hopper reads and writes."""

import torch
from torch import Tensor

from tilewright.ops.gemm.operands import aligned, columns_out

_INPUTS = (torch.bfloat16, torch.float16)
_OUTPUTS = (*_INPUTS, torch.float32)


def refusal(
    a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor | None, activation: str, out_dtype: torch.dtype
) -> str | None:
    """Why neither of them can run these arguments, by dtypes and alignment; None if they can."""
    if a.dtype not in _INPUTS or b.dtype != a.dtype:
        return f"multiplies bf16 or fp16 operands of one dtype, got {a.dtype} and {b.dtype}"
    if any(dtype not in _OUTPUTS for dtype in (out_dtype, *(t.dtype for t in (bias, c) if t is not None))):
        return "takes a bias, an addend and a result of bf16, fp16 or fp32"
    if not aligned(a, b, columns_out(b.shape[-1], activation), out_dtype):
        return "needs addresses, strides and rows of the result that are multiples of 16 bytes"
    return None
