"""The layout of 8-bit and 4-bit weights in memory, and the arithmetic of quantization, in plain torch.

A weight (N, K), rows being output channels, is cut into groups of 128 along K; the last one may be shorter.  A group of
a row has one scale, and an element is the integer q times that scale.  There is no zero point.

    8 bits   q (N, K) int8, from -127 to 127
    4 bits   q (N, K / 2) uint8, K even: byte j of a row holds element 2 j in its low four bits, element 2 j + 1 in its
             high four, each from -7 to 7 in two's complement (products take -8 and -128 as well)
    scales   (N, ceil(K / 128)), those of one group adjacent in memory for consecutive rows: strides (1, pitch), the
             pitch a multiple of 16 bytes, so that TMA loads the scales of a tile's rows as one line

`quantise` makes bfloat16 scales of every weight: at 4 bits they are 3 % of the bytes, as float32 they would be 6 %.
q is rounded for the stored scale, so the only loss is that a scale may be 0.4 % larger than needed.  float16 would be
too narrow: it ends at 6e-5, the scale of 8-bit weights of 0.007.  Products take float16 and float32 scales too.

    amax  = max |w| of the group
    scale = amax * fl(1 / 127) or fl(1 / 7) in float32, rounded to bfloat16; 0 if amax is below 2^-100
    q     = w * fl(1 / scale) in float32, rounded to the nearest integer, ties to even; 0 where scale is 0

|w| / scale is below 127.5 (7.03), so q needs no clamp to 127 (7).
A group with a NaN or an infinity has such a scale and q = 0: its elements dequantise to NaN.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewright.dispatch.bucket import hint
from tilewright.ops.quant.layout import ScaleLayout

GROUP = 128
AMAX_MIN = 2.0**-100
"""Groups of smaller elements count as zero: the reciprocal of their scale would overflow float32."""
INVERSE = {8: 8454660 * 2.0**-30, 4: 9586981 * 2.0**-26}
"""Maps bits to 1 / 127 and 1 / 7 rounded to float32.  Division by a constant is a product, as in torch's GPU kernels,
so that every device gives the same bits.
"""
SCALES = (torch.bfloat16, torch.float16, torch.float32)
"""dtypes of scales that products take."""


def bits_of(q: Tensor) -> int:
    """Returns 8 for int8, 4 for uint8, which holds two elements a byte."""
    return 4 if q.dtype == torch.uint8 else 8


def layout(dtype: torch.dtype) -> ScaleLayout:
    """Returns the layout of scales of `dtype`."""
    return ScaleLayout(1, GROUP, dtype, along_rows=True, alignment=16 // dtype.itemsize)


def groups(depth: int) -> int:
    """Returns the number of groups in a row of `depth` elements."""
    return -(-depth // GROUP)


def depth_of(q: Tensor) -> int:
    """Returns K of the weight that `q` holds."""
    return q.shape[-1] * (2 if bits_of(q) == 4 else 1)


def in_layout(scales: Tensor) -> bool:
    """Returns whether scales of consecutive rows are adjacent, and their lines aligned to 16 bytes."""
    rows, lines = hint(scales.shape[0]), hint(scales.shape[1])
    pitch = hint(scales.stride(1)) * scales.element_size()
    return (rows == 1 or hint(scales.stride(0)) == 1) and (lines == 1 or (pitch % 16 == 0 and pitch > 0))


def quantise(w: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns (q, scales) of a weight (N, K) of any dtype, computed in float32, as integers need no finer oracle.  The
    scales of a float64 weight are bfloat16 numbers stored as float64.
    """
    rows, depth = w.shape
    cut = pad(w.to(torch.float32), (0, -depth % GROUP)).view(rows, groups(depth), GROUP)
    amax = cut.abs().amax(-1)
    stored = to_bfloat16(torch.where(amax < AMAX_MIN, 0.0, amax * INVERSE[bits]))
    # In float64: compilers may approximate a float32 division; rounded, this is the float32 reciprocal
    inverse = torch.where(stored == 0, 0.0, (1.0 / stored.to(torch.float64)).to(torch.float32))
    scaled = cut * inverse[..., None]
    q = torch.where(scaled.isnan(), 0.0, scaled.round()).flatten(1)[:, :depth].to(torch.int8)
    packed = q.contiguous() if bits == 8 else pack(q)
    if w.dtype == torch.float64:
        return packed, stored.to(torch.float64)
    return packed, layout(torch.bfloat16).empty(rows, depth, w.device).copy_(stored)


def to_bfloat16(x: Tensor) -> Tensor:
    """Rounds float32 x to bfloat16 numbers, as a cast does, and returns float32.

    Uses integer arithmetic: a compiler that keeps float32 between fused operations, as Inductor, removes a cast to
    bfloat16 and back, and q would be rounded for a scale that is not the stored one.
    """
    bits = x.view(torch.int32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


def pack(q: Tensor) -> Tensor:
    """Packs int8 from -8 to 7, (..., K) with K even, two elements a byte: (..., K / 2) uint8."""
    low, high = q[..., 0::2], q[..., 1::2]
    return ((low & 15) | (high << 4)).view(torch.uint8)


def unpack(q: Tensor) -> Tensor:
    """Returns the integers of a packed weight as int8, (..., K); int8 unchanged."""
    if bits_of(q) == 8:
        return q
    packed_bytes = q.view(torch.int8)
    return torch.stack((packed_bytes << 4 >> 4, packed_bytes >> 4), -1).flatten(-2)


def restore(q: Tensor, scales: Tensor) -> Tensor:
    """Returns q * scale (N, K), in float32; in float64 if the scales are float64."""
    scales_fp = scales if scales.dtype == torch.float64 else scales.to(torch.float32)
    integers = unpack(q).to(scales_fp.dtype)
    return integers * scales_fp.repeat_interleave(GROUP, -1)[:, : integers.shape[-1]]
