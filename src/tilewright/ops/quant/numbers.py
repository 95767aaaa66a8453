"""The arithmetic of 8-bit quantisation in plain torch: amax -> scale -> e4m3, and back.  Every reference uses it.

For each block of elements that shares a scale, in float32

    amax  = max |x|                            exact
    scale = max(amax, 1e-4) * fl(1 / 448)      rounded up to a power of two if `ue8m0`
    q     = e4m3(x * (1 / scale))              one reciprocal a block, one product an element, round to nearest even

Division by a constant is written as a product, as torch's CUDA kernels compute it.  So a CPU, a GPU and our kernels
agree in every bit, with each other and with DeepGEMM's cast on a GPU.  |x| / scale is at most 448 (1 + 2^-22), which
rounds to 448: nothing overflows and nothing needs a clamp.  A block with a NaN has a NaN scale; a block with an
infinity has an infinite scale, and the infinity becomes NaN: dequantised, all of such a block is NaN.

With float64 input the same functions are an oracle: scales are float64 and q = x / scale is not rounded, so that the
results of a kernel and of torch are both within half an e4m3 step of it.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewright.ops.quant.layout import WHOLE, ScaleLayout

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
AMAX_MIN = 1e-4
"""The least amax, so that no scale is 0."""
INVERSE_MAX = 9586981 * 2.0**-32
"""1 / 448 rounded to float32.  448 * 2^k times it is 2^k exactly, and a larger amax gives more, so that scales rounded
up to powers of two equal those of a division.
"""


def block_amax(x: Tensor, layout: ScaleLayout) -> Tensor:
    """Largest magnitude in each block of x (..., R, K), in x's dtype: (..., R blocks, K blocks).  NaN wins."""
    *batch, rows, depth = x.shape
    row_blocks, block_rows = _block_counts(rows, layout.rows)
    depth_blocks, block_depth = _block_counts(depth, layout.depth)
    more_rows, more_depth = row_blocks * block_rows - rows, depth_blocks * block_depth - depth
    padded = pad(x, (0, more_depth, 0, more_rows)) if more_rows or more_depth else x
    return padded.reshape(*batch, row_blocks, block_rows, depth_blocks, block_depth).abs().amax((-3, -1))


def scale_of(amax: Tensor, ue8m0: bool = False) -> Tensor:
    """Scale of blocks whose largest magnitude is `amax`: float32 (float64 if amax is), same shape."""
    amax_fp32 = _at_least_fp32(amax).clamp(min=AMAX_MIN)
    scale = amax_fp32 / E4M3_MAX if amax_fp32.dtype == torch.float64 else amax_fp32 * INVERSE_MAX
    return power_of_two_above(scale) if ue8m0 else scale


def power_of_two_above(scale: Tensor) -> Tensor:
    """Least power of two that is not below `scale` (positive, normal); Inf and NaN stay.

    Adding all ones to the mantissa carries into the exponent, unless the mantissa is 0.
    """
    integer, ones = (torch.int64, (1 << 52) - 1) if scale.dtype == torch.float64 else (torch.int32, (1 << 23) - 1)
    rounded = ((scale.view(integer) + ones) & ~ones).view(scale.dtype)
    return torch.where(scale.isfinite(), rounded, scale)


def quantise(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale in e4m3, `scale` broadcast to x; float64 is not rounded."""
    scaled = _at_least_fp32(x) * (1.0 / scale)
    return scaled if scaled.dtype == torch.float64 else scaled.to(E4M3)


def spread(scales: Tensor, layout: ScaleLayout, rows: int, depth: int) -> Tensor:
    """`scales` (..., R blocks, K blocks), not packed, as one scale an element: (..., rows, depth)."""
    block_rows, block_depth = _block_counts(rows, layout.rows)[1], _block_counts(depth, layout.depth)[1]
    *batch, row_blocks, depth_blocks = scales.shape
    expanded = scales[..., :, None, :, None].expand(*batch, row_blocks, block_rows, depth_blocks, block_depth)
    return expanded.reshape(*batch, row_blocks * block_rows, depth_blocks * block_depth)[..., :rows, :depth]


def cast(x: Tensor, layout: ScaleLayout, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """(q, scales) of x (..., R, K): q contiguous, scales in `layout`.  Packed layouts need `ue8m0`."""
    *batch, rows, depth = x.shape
    scales = scale_of(block_amax(x, layout), ue8m0)
    q = quantise(x, spread(scales, layout, rows, depth)).contiguous()
    stored = pack(scales) if layout.dtype == torch.int32 else scales
    if stored.dtype != layout.dtype:  # float64 scales, of the oracle, need no layout
        return q, stored
    return q, layout.empty(rows, depth, x.device, *batch).copy_(stored)


def restore(q: Tensor, scales: Tensor, layout: ScaleLayout, dtype: torch.dtype) -> Tensor:
    """q * scale in float32 (float64 if q is), rounded once to `dtype`."""
    rows, depth = q.shape[-2:]
    plain = unpack(scales, -(-depth // layout.depth)) if layout.dtype == torch.int32 else scales
    return (_at_least_fp32(q) * spread(plain, layout, rows, depth)).to(dtype)


def pack(scales: Tensor) -> Tensor:
    """Powers of two (..., R, B) as int32 (..., R, ceil(B / 4)): four exponents a word, the first lowest, absent ones 0.

    An exponent is float32's own, biased by 127; 255 is NaN in UE8M0, and stands for Inf too.
    """
    exponents = (scales.to(torch.float32).view(torch.int32) >> 23) & 255
    a, b, c, d = pad(exponents, (0, -scales.shape[-1] % 4)).unflatten(-1, (-1, 4)).unbind(-1)
    return a | b << 8 | c << 16 | d << 24


def unpack(words: Tensor, blocks: int) -> Tensor:
    """float32 scales (..., R, blocks) from packed ones."""
    exponents = torch.stack([(words >> shift) & 255 for shift in (0, 8, 16, 24)], -1).flatten(-2)[..., :blocks]
    return torch.where(exponents == 255, torch.nan, (exponents << 23).view(torch.float32))


def _at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def _block_counts(size: int, block: int) -> tuple[int, int]:
    """(number of blocks, elements of each); WHOLE of size 0 is one block of padding."""
    return (1, max(size, 1)) if block == WHOLE else (-(-size // block), block)
