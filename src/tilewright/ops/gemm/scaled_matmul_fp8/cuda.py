"""scaled_matmul_fp8 in CUDA C++ for Hopper: `engines/fp8_cuda.py` with the epilogue that quantises.

128 results of a row and their scale are computed from the accumulators, so the float32 result is never stored: 1 + 1/32
bytes an element are written instead of 4, and no second launch reads them.
"""

import sys

from torch import Tensor

from tilewright.ops.gemm.kernels.sm90 import fp8 as fp8_cuda
from tilewright.ops.gemm.kernels.sm90.fp8 import CONFIGS_FP8 as CONFIGS
from tilewright.ops.gemm.kernels.sm90.fp8 import Config, candidates, configure, gemm_fp8
from tilewright.ops.gemm.kernels.sm90.hopper_fp8_cuda import why_not_machine
from tilewright.ops.gemm.scaled_registration import register_scaled_matmul_fp8

__all__ = ["CONFIGS", "Config", "candidates", "configure", "gemm_fp8", "why_not_fp8"]


def why_not_fp8(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, alpha: float, activation: str
) -> str | None:
    """Why the engine cannot run these arguments; None if it can."""
    return why_not_machine(a) or fp8_cuda.why_not_fp8(a, b, scale_a, scale_b, bias, alpha, activation)


register_scaled_matmul_fp8("cuda", sys.modules[__name__])
