"""How weights of 8 and 4 bits lie in memory, and the arithmetic that makes them, in plain torch.

A weight (N, K), rows being output channels, is cut into groups of 128 along K; the last one may be shorter.  A group of
a row has one scale, and an element is the integer q times that scale.  There is no zero point.

    8 bits   q (N, K) int8, from -127 to 127
    4 bits   q (N, K / 2) uint8, K even: byte j of a row holds element 2 j in its low four bits, element 2 j + 1 in its
             high four, each from -7 to 7 in two's complement (products take -8 and -128 as well)
    scales   (N, ceil(K / 128)), those of one group for consecutive rows side by side in memory: strides (1, pitch), the
             pitch a multiple of 16 bytes, so that the copy engine brings the scales of a tile's rows as one line

`quantise` makes bfloat16 scales of every weight: at 4 bits they are 3 % of the bytes, as float32 they would be 6 %.
q is rounded for the scale as it is stored, so that nothing is lost but that a scale may be 0.4 % larger than it must;
and no scale is too small, as in float16, which ends at 6e-5, where weights of 0.007 have theirs at 8 bits.  Products
take float16 and float32 scales too.

    amax  = max |w| of the group
    scale = amax * fl(1 / 127) or fl(1 / 7) in float32, rounded to bfloat16; 0 if amax is below 2^-100
    q     = w * fl(1 / scale) in float32, rounded to the nearest integer, ties to even; 0 where scale is 0

|w| / scale is below 127.5 (7.03), so that nothing needs to be cut to 127 (7).
A group with a NaN or an infinity has such a scale and q = 0 there: dequantised, an element of it that counts is NaN.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewright.dispatch.bucket import hint
from tilewright.ops.quant.layout import ScaleLayout

GROUP = 128
AMAX_MIN = 2.0**-100
"""Groups of smaller elements count as zero: the reciprocal of their scale would leave float32."""
INVERSE = {8: 8454660 * 2.0**-30, 4: 9586981 * 2.0**-26}
"""By bits: 1 / 127 and 1 / 7 rounded to float32.  A division by a constant is written as a product, as torch's kernels
on a GPU make it, so that every device gives the same bits.
"""
SCALES = (torch.bfloat16, torch.float16, torch.float32)
"""dtypes of scales that products take."""


def bits_of(q: Tensor) -> int:
    """8 for int8, 4 for uint8, which holds two elements a byte."""
    return 4 if q.dtype == torch.uint8 else 8


def layout(dtype: torch.dtype) -> ScaleLayout:
    """Where scales of `dtype` lie."""
    return ScaleLayout(1, GROUP, dtype, along_rows=True, alignment=16 // dtype.itemsize)


def groups(depth: int) -> int:
    """Groups of a row of `depth` elements."""
    return -(-depth // GROUP)


def depth_of(q: Tensor) -> int:
    """K of the weight that `q` holds."""
    return q.shape[-1] * (2 if bits_of(q) == 4 else 1)


def in_layout(scales: Tensor) -> bool:
    """Do scales of consecutive rows lie side by side, and lines of them 16 bytes aligned?"""
    rows, lines = hint(scales.shape[0]), hint(scales.shape[1])
    pitch = hint(scales.stride(1)) * scales.element_size()
    return (rows == 1 or hint(scales.stride(0)) == 1) and (lines == 1 or (pitch % 16 == 0 and pitch > 0))


def quantise(w: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(q, scales) of a weight (N, K), whatever its dtype, in float32: integers know no finer oracle.  Of a float64
    weight the scales, bfloat16 numbers, are float64.
    """
    rows, depth = w.shape
    cut = pad(w.to(torch.float32), (0, -depth % GROUP)).view(rows, groups(depth), GROUP)
    amax = cut.abs().amax(-1)
    stored = to_bfloat16(torch.where(amax < AMAX_MIN, 0.0, amax * INVERSE[bits]))
    # In float64, as compilers make an approximate division of a float32 one; rounded, it is the float32 reciprocal
    inverse = torch.where(stored == 0, 0.0, (1.0 / stored.to(torch.float64)).to(torch.float32))
    scaled = cut * inverse[..., None]
    q = torch.where(scaled.isnan(), 0.0, scaled.round()).flatten(1)[:, :depth].to(torch.int8)
    packed = q.contiguous() if bits == 8 else pack(q)
    if w.dtype == torch.float64:
        return packed, stored.to(torch.float64)
    return packed, layout(torch.bfloat16).empty(rows, depth, w.device).copy_(stored)


def to_bfloat16(x: Tensor) -> Tensor:
    """float32 x rounded to the numbers of bfloat16, as a cast does it, but still float32.

    By arithmetic of integers: a cast there and back is nothing to a compiler that keeps float32 between the operations
    that it fuses, as torch's Inductor does, and q would be rounded for a scale that is not the stored one.
    """
    bits = x.view(torch.int32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


def pack(q: Tensor) -> Tensor:
    """int8 from -8 to 7, (..., K) with K even, as two elements a byte: (..., K / 2) uint8."""
    low, high = q[..., 0::2], q[..., 1::2]
    return ((low & 15) | (high << 4)).view(torch.uint8)


def unpack(q: Tensor) -> Tensor:
    """The integers of a packed weight as int8, (..., K); int8 as it is."""
    if bits_of(q) == 8:
        return q
    packed_bytes = q.view(torch.int8)
    return torch.stack((packed_bytes << 4 >> 4, packed_bytes >> 4), -1).flatten(-2)


def restore(q: Tensor, scales: Tensor) -> Tensor:
    """q * scale (N, K), in float32; in float64 if the scales are float64."""
    scales_fp = scales if scales.dtype == torch.float64 else scales.to(torch.float32)
    integers = unpack(q).to(scales_fp.dtype)
    return integers * scales_fp.repeat_interleave(GROUP, -1)[:, : integers.shape[-1]]
