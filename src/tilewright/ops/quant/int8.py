"""The arithmetic of symmetric int8 quantisation in plain torch.

For each row, in float32

    scale = max(amax, 127 * 2^-126) * fl(1 / 127)
    q     = int8(x * (1 / scale))                   rounded to nearest even, never -128

The floor keeps the reciprocal finite: a row of zeros has the scale 2^-126 and zeros as q.  |x| / scale is at most
127 (1 + 2^-22), which rounds to 127.  A row with a NaN or an infinity has it as its scale and zeros as q: dequantised,
all of the row is NaN, as with the casts to float8.
"""

import torch
from torch import Tensor

from tilewright.errors import InputError

INT8_MAX = 127
INVERSE_MAX = 8454660 * 2.0**-30
"""1 / 127 rounded to float32: a product gives the same bits on a CPU and a GPU, a division by a constant does not."""
AMAX_MIN = INT8_MAX * 2.0**-126
SOURCES = (torch.bfloat16, torch.float16, torch.float32)


def scale_of(amax: Tensor) -> Tensor:
    """float32 scales of rows whose largest magnitude is `amax`."""
    return amax.to(torch.float32).clamp(min=AMAX_MIN) * INVERSE_MAX


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(q, scales) of x (..., R, K) bf16|fp16|fp32: int8 (..., R, K) and float32 (..., R), one scale a row.

    Rows are tokens of activations, or output channels of a weight (N, K).  |q * scale - x| is at most about scale / 2.
    """
    if x.dtype not in SOURCES:
        raise InputError(f"quantise_rows: x is {x.dtype}; needs bfloat16, float16 or float32.")
    if x.dim() < 2:
        raise InputError(f"quantise_rows: x is {tuple(x.shape)}; needs (..., R, K).")
    x_fp32 = x.to(torch.float32)
    scales = scale_of(x_fp32.abs().amax(-1) if x.shape[-1] else x_fp32.new_zeros(x.shape[:-1]))
    scaled = torch.round(x_fp32 * (1.0 / scales)[..., None])
    return torch.where(scales.isfinite()[..., None], scaled, 0.0).to(torch.int8), scales


def dequantise_rows(q: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """q * scale in float32, rounded once to `dtype`."""
    return (q.to(torch.float32) * scales[..., None]).to(dtype)
