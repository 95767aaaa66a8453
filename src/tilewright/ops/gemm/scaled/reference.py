"""The scaled product in plain torch: the oracle in float64; on a GPU cuBLAS runs the scalings that it supports.

Otherwise operands are dequantised to float32 and multiplied in float32: the only error is that of a float32 sum.
"""

import torch
from torch import Tensor

from tilewright.ops.gemm.operands import FP8, apply_epilogue
from tilewright.ops.gemm.scaled import cublas as scaled_cublas
from tilewright.ops.gemm.scaled.args import ScaledMatmulArgs, ScaledMatmulFp8Args, with_result
from tilewright.ops.gemm.scaled.scaling import granularity
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.quant.numbers import cast, restore


def product(args: ScaledMatmulArgs) -> Tensor:
    """Returns act(alpha * (a * scale_a) @ (b * scale_b) + bias) + c, rounded once.

    float64 operands give float64, whatever `out_dtype` says.
    """
    a, b, scale_a, scale_b, bias, c, alpha, activation, out_dtype = args
    if a.dtype == torch.float64:
        out_dtype = torch.float64
    plain = bias is None and c is None and not activation and alpha == 1.0
    # float16 would do, but not every version of cuBLAS returns it for block scales
    z_dtype = out_dtype if plain and out_dtype == torch.bfloat16 else torch.float32
    z = scaled_cublas.product(a, b, scale_a, scale_b, z_dtype) if a.dtype == FP8 else None
    if z is None:
        z = _dequantised(a, scale_a) @ _dequantised(b.mT, scale_b).mT
    if alpha != 1.0:
        z = z * alpha
    return apply_epilogue(z, bias, c, activation, out_dtype)


def requantised(args: ScaledMatmulFp8Args) -> tuple[Tensor, Tensor]:
    """Returns (q, scales): the float32 result with one scale for 128 of a row; `ops/quant/numbers.py` has float64."""
    return cast(product(with_result(args, torch.float32)), TOKEN)


def _dequantised(q: Tensor, scales: Tensor) -> Tensor:
    """Returns q (R, K) times its scales, in float32 (float64 for float64 q)."""
    layout = granularity(scales.shape, *q.shape)
    assert layout is not None, "the checks allow no other shapes"
    return restore(q, scales, layout, torch.float64 if q.dtype == torch.float64 else torch.float32)
