"""Numbers of 4 and 8 bits whose scales belong to short blocks of a row, in plain torch.

    format   element   block   scale of a block     scale of the tensor   bits an element
    mxfp8    e4m3      32      E8M0                 -                     8.25
    mxfp4    e2m1      32      E8M0                 -                     4.25
    nvfp4    e2m1      16      e4m3                 float32               4.5

x is (..., M, K), blocks lie along K, and K is a multiple of the block.

    q        mxfp8: (..., M, K) float8_e4m3fn.  Else (..., M, K / 2) uint8: element 2 j in the low four bits of byte j,
             element 2 j + 1 in the high four
    scales   (..., M, K / block), contiguous: uint8 of E8M0, an exponent biased by 127 (255 is NaN); nvfp4 float8_e4m3fn

The three together name the format (`format_of`).  Transformers' gpt-oss has mxfp4 in this order with a dimension more:
blocks (..., M, K / 32, 16).

MX formats, as the OCP Microscaling specification (v1.0, section 6.3) has them, with amax = max |x| of a block:

    scale = 2^(floor(log2 amax) - emax), emax = 8 of e4m3, 2 of e2m1; at least 2^-127, which an amax of 0 has too
    q     = x / scale, rounded to nearest even; beyond the largest number, 448 or 6, it is that number

NVFP4, with t the scale of the tensor, by default amax of the tensor times fl(1 / 2688) (2688 = 448 * 6):

    scale = e4m3(amax * (fl(1 / 6) * fl(1 / t))), at most 448
    q     = x * fl(1 / fl(scale * t)), rounded to nearest even, at most 6; 0 where scale is 0

A block with a NaN or an infinity has a NaN as its scale and zeros as its elements: all of it dequantises to NaN.
Zeros keep their sign.  Arithmetic is float32, each step rounded once, so that every device makes the same bits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

E4M3, UINT8 = torch.float8_e4m3fn, torch.uint8
INVERSE_6 = 11184811 * 2.0**-26
"""1 / 6 rounded to float32."""
INVERSE_2688 = 12782641 * 2.0**-35
"""1 / 2688 rounded to float32."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of e2m1 without their sign."""


class Format(NamedTuple):
    """block: elements of a scale.   emax: exponent of the largest power of two of an element."""

    name: str
    block: int
    bits: int
    emax: int
    scale_dtype: torch.dtype

    @property
    def element_dtype(self) -> torch.dtype:
        """dtype of q."""
        return E4M3 if self.bits == 8 else UINT8

    def stored(self, depth: int) -> int:
        """Columns of q for K = depth."""
        return depth if self.bits == 8 else depth // 2


FORMATS = {
    "mxfp4": Format("mxfp4", 32, 4, 2, UINT8),
    "mxfp8": Format("mxfp8", 32, 8, 8, UINT8),
    "nvfp4": Format("nvfp4", 16, 4, 2, E4M3),
}


def format_of(q: Tensor, scales: Tensor) -> Format | None:
    """Returns the format that these dtypes name; None for others.  Wider floats are an oracle's e4m3."""
    dtypes = tuple(E4M3 if t.dtype.is_floating_point else t.dtype for t in (q, scales))
    return next((f for f in FORMATS.values() if (f.element_dtype, f.scale_dtype) == dtypes), None)


def tensor_scale_of(x: Tensor) -> Tensor:
    """Returns the scale of the tensor of nvfp4, (1,) float32, of at least the least normal number."""
    if not x.numel():
        return torch.ones(1, device=x.device)
    amax = x.detach().abs().amax().to(torch.float32).reshape(1)
    return (amax * INVERSE_2688).clamp(min=2.0**-120)


def quantise(x: Tensor, fmt: Format, tensor_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (q, scales); of a float64 x e4m3 numbers are stored as float64."""
    if x.dtype == torch.float64:
        parts = quantise(x.to(torch.float32), fmt, tensor_scale)
        q, scales = (t.to(torch.float64) if t.dtype == E4M3 else t for t in parts)
        return q, scales
    blocks = x.to(torch.float32).resolve_neg().unflatten(-1, (x.shape[-1] // fmt.block, fmt.block))
    magnitude = blocks.view(torch.int32) & 0x7FFFFFFF
    amax = magnitude.amax(-1)  # as integers, in the order of the numbers, NaN on top
    finite = amax < 0x7F800000
    if fmt.scale_dtype == UINT8:
        exponent = ((amax >> 23) - fmt.emax).clamp(min=0)
        scales = torch.where(finite, exponent, 255).to(UINT8)
        inverse = _power((254 - exponent).clamp(min=0))
    else:
        assert tensor_scale is not None
        t = tensor_scale.to(torch.float32)
        reciprocal = (1.0 / t.to(torch.float64)).to(torch.float32)
        target = amax.view(torch.float32) * (reciprocal * INVERSE_6)
        stored = torch.where(finite & ~target.isnan(), target.clamp(max=448.0), torch.nan).to(E4M3)
        scales, product = stored, stored.to(torch.float32) * t
        inverse = torch.where(product == 0, 0.0, (1.0 / product.to(torch.float64)).to(torch.float32))
    scaled = torch.where(finite[..., None], blocks * torch.where(finite, inverse, 0.0)[..., None], 0.0)
    scaled = torch.where(scaled.isnan(), 0.0, scaled)  # the scale of the tensor is no number
    if fmt.bits == 8:
        return scaled.clamp(-448.0, 448.0).to(E4M3).flatten(-2), scales
    return pack(encode(scaled).flatten(-2)), scales


def encode(x: Tensor) -> Tensor:
    """Returns float32 x as e2m1 codes 0 to 15, one a byte: to the nearest, ties to an even code, at most 6."""
    v = x.abs()
    code = (v > 0.25).to(UINT8) + (v >= 0.75) + (v > 1.25) + (v >= 1.75) + (v > 2.5) + (v >= 3.5) + (v > 5.0)
    return code.to(UINT8) | (x.signbit().to(UINT8) << 3)


def pack(codes: Tensor) -> Tensor:
    """Returns two codes a byte, the first in the low bits."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(q: Tensor) -> Tensor:
    """Returns the e2m1 numbers of packed bytes as float32, (..., K)."""
    codes = torch.stack((q & 15, q >> 4), -1).flatten(-2).to(torch.int32)
    rest = codes & 7
    twice = torch.where(rest < 2, rest, ((rest & 1) | 2) << ((rest >> 1) - 1).clamp(min=0))
    value = twice.to(torch.float32) * 0.5
    return torch.where(codes > 7, -value, value)


def restore(q: Tensor, scales: Tensor, tensor_scale: Tensor | None) -> Tensor:
    """Returns element * scale of its block, then * that of the tensor, float32 (..., K)."""
    fmt = format_of(q, scales)
    assert fmt is not None, "checked"
    elements = q.to(torch.float32) if fmt.bits == 8 else unpack(q)
    plain = scales.to(torch.float32) if scales.dtype != UINT8 else _power(scales.to(torch.int32))
    values = (elements.unflatten(-1, (plain.shape[-1], fmt.block)) * plain[..., None]).flatten(-2)
    return values if tensor_scale is None else values * tensor_scale.to(torch.float32)


def _power(exponent: Tensor) -> Tensor:
    """Returns 2^(exponent - 127) of int32 0 to 255: a subnormal number for 0, NaN for 255."""
    bits = torch.where(exponent == 0, 0x00400000, exponent << 23)
    return torch.where(exponent == 255, torch.nan, bits.view(torch.float32))
