"""e4m3 products by cuBLASLt where it takes them; elsewhere they are bf16 products of the same numbers.

Tensor cores add products of e4m3 with fewer bits than float32 has: the relative error of a result grows with K, from
1.7e-3 (the rounding to bf16) to 2.5e-3 at 7168 and 3.8e-3 at 16384.
"""

import torch
from torch import Tensor

from tilewright.ops.gemm.operands import FP8
from tilewright.ops.gemm.scaled import cublas

LONGEST = 8192  # K


def product(a: Tensor, b: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns scale * a @ b of (M, K) and (K, N), rounded once; None if cuBLAS does not take it or K is long.

    cuBLASLt wants two scales in memory: a launch before the product writes a one.
    """
    if a.dtype != FP8 or a.device.type != "cuda" or a.dim() != 2 or not 0 < a.shape[1] <= LONGEST:
        return None
    one = torch.ones((1, 1), dtype=torch.float32, device=a.device)
    return cublas.product(a, b, one if scale is None else scale.reshape(1, 1), one, dtype)
