"""What the kernels for Hopper require of their operands."""

import torch
from torch import Tensor

from tilewright.hardware.device import device_info
from tilewright.jit.collect import collecting
from tilewright.ops.gemm.operands import FP8, Major, aligned, columns_out, major_a, major_b
from tilewright.ops.gemm.scaled.scaling import Scaling, scaling_of

_INPUTS = (torch.bfloat16, torch.float16)
_OUTPUTS = (*_INPUTS, torch.float32)


def why_not_arch(a: Tensor) -> str | None:
    """Why no kernel of this folder runs on the device of `a`; None if they do."""
    arch = device_info(a.device).arch
    return None if arch == "sm_90" else f"is written for Hopper's tensor cores (sm_90), and this is {arch}"


def why_not_machine(a: Tensor) -> str | None:
    """Why no kernel of this folder runs on the device of `a`, or with its K; None if they do."""
    return why_not_arch(a) or (None if a.shape[-1] else "has no tiles for K = 0")


def why_not_16_bit(
    a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor | None, activation: str, out_dtype: torch.dtype
) -> str | None:
    """Why no bf16 or fp16 kernel can run these arguments, by dtypes and alignment; None if they can."""
    if a.dtype not in _INPUTS or b.dtype != a.dtype:
        return f"multiplies bf16 or fp16 operands of one dtype, got {a.dtype} and {b.dtype}"
    return _why_not_epilogue(a, b, bias, c, activation, out_dtype)


def why_not_scaled(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> str | None:
    """Why no kernel of scaled e4m3 operands can run these arguments; None if they can."""
    if a.dtype != FP8 or b.dtype != FP8:
        return f"multiplies float8_e4m3fn operands, got {a.dtype} and {b.dtype}"
    if scaling_of(a, b, scale_a, scale_b) is Scaling.OTHER:
        return "takes scales of the pairs that Scaling names"
    if major_a(a) is not Major.K or major_b(b) is not Major.K:
        return "needs a and b contiguous along K: the tensor cores read 8-bit operands no other way"
    return _why_not_epilogue(a, b, bias, c, activation, out_dtype)


def _why_not_epilogue(
    a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor | None, activation: str, out_dtype: torch.dtype
) -> str | None:
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
