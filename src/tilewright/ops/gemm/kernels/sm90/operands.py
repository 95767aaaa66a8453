"""What TMA and the CUDA C++ engines require of their operands."""

import torch
from torch import Tensor

from tilewright.jit.collect import collecting
from tilewright.ops.gemm.operands import aligned, columns_out

_INPUTS = (torch.bfloat16, torch.float16)
_OUTPUTS = (*_INPUTS, torch.float32)


def why_not(
    a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor | None, activation: str, out_dtype: torch.dtype
) -> str | None:
    """Why no bf16 or fp16 engine can run these arguments, by dtypes and alignment; None if they can."""
    if a.dtype not in _INPUTS or b.dtype != a.dtype:
        return f"multiplies bf16 or fp16 operands of one dtype, got {a.dtype} and {b.dtype}"
    if any(dtype not in _OUTPUTS for dtype in (out_dtype, *(t.dtype for t in (bias, c) if t is not None))):
        return "takes a bias, an addend and a result of bf16, fp16 or fp32"
    if not aligned(a, b, columns_out(b.shape[-1], activation), out_dtype):
        return "needs addresses, strides and rows of the result that are multiples of 16 bytes"
    return None


def adds_in_place(c: Tensor, d: Tensor) -> bool:
    """Returns whether the epilogue is d += act(...) in float32.  Then TMA adds, and C takes no registers."""
    same = c is d or (collecting() is None and c.data_ptr() == d.data_ptr() and c.stride() == d.stride())
    return same and c.dtype == d.dtype == torch.float32


def in_pairs(c: Tensor) -> bool:
    """Returns whether two neighbouring elements of c can be read at once in every row."""
    # Fake tensors have no address: assume that storage is aligned to 16 bytes
    start = c.storage_offset() * c.itemsize if collecting() is not None else c.data_ptr()
    return start % (2 * c.itemsize) == 0 and all(stride % 2 == 0 for stride in c.stride()[:2])
