"""Casts to float8 with DeepGEMM's names, arguments and values, on the ops of `tilewright.ops.quant`.

Scales are row-major, as DeepGEMM's are, so that programs may `view` them in any shape.  Products read them with
consecutive rows adjacent: `transform_sf_into_required_layout` converts them once, else each product does.
"""

import torch
from torch import Tensor

from tilewright.compat.deep_gemm.sizes import ceil_div
from tilewright.errors import InputError
from tilewright.ops.quant import numbers
from tilewright.ops.quant.layout import ScaleLayout
from tilewright.ops.quant.per_block_cast_to_fp8 import per_block_cast_to_fp8 as block_cast
from tilewright.ops.quant.per_channel_cast_to_fp8 import per_channel_cast_to_fp8 as channel_cast
from tilewright.ops.quant.per_token_cast_to_fp8 import per_token_cast_to_fp8 as token_cast

_KERNEL_BLOCK = 128  # elements that share a scale in kernels; other granularities are plain torch
_MANTISSA_BITS = 23  # of a float32


def per_token_cast_to_fp8(
    x: Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """(q, scales) of x (M, N): q (M, N) e4m3, scales (M, ceil(N / gran_k)) float32, max(amax, 1e-4) / 448 each.

    use_ue8m0: scales rounded up to powers of two.   use_packed_ue8m0: as int32, four exponents in each.
    """
    _two_dimensions("per_token_cast_to_fp8", x)
    if gran_k == _KERNEL_BLOCK:
        return _row_major(token_cast(x, ue8m0=use_ue8m0, packed=use_packed_ue8m0))
    q, scales = numbers.cast(x, _rows_of(1, gran_k), use_ue8m0 or use_packed_ue8m0)
    return q, numbers.pack(scales) if use_packed_ue8m0 else scales


def per_channel_cast_to_fp8(x: Tensor, use_ue8m0: bool, gran_k: int = 128) -> tuple[Tensor, Tensor]:
    """(q, scales) of x (T, N): scales (ceil(T / gran_k), N), one for gran_k rows of a column; else as per token."""
    _two_dimensions("per_channel_cast_to_fp8", x)
    if gran_k == _KERNEL_BLOCK:
        return _row_major(channel_cast(x, ue8m0=use_ue8m0))
    return numbers.cast(x, _rows_of(gran_k, 1), use_ue8m0)


def per_block_cast_to_fp8(x: Tensor, use_ue8m0: bool, gran_k: int = 128) -> tuple[Tensor, Tensor]:
    """(q, scales) of x (N, K): scales (ceil(N / gran_k), ceil(K / gran_k)), one for a square; else as per token."""
    _two_dimensions("per_block_cast_to_fp8", x)
    if gran_k == _KERNEL_BLOCK:
        return _row_major(block_cast(x, ue8m0=use_ue8m0))
    return numbers.cast(x, _rows_of(gran_k, gran_k), use_ue8m0)


def per_custom_dims_cast_to_fp8(x: Tensor, dims: tuple[int, ...], use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """(q, scales) of x with one scale for each index of `dims`, over all other dimensions; in plain torch."""
    kept_dims = {dim % x.dim() for dim in dims}
    amax = x.detach().abs().amax([dim for dim in range(x.dim()) if dim not in kept_dims], keepdim=True)
    scales = numbers.scale_of(amax, use_ue8m0)
    return numbers.quantise(x.detach(), scales), scales.squeeze()


def ceil_to_ue8m0(x: Tensor) -> Tensor:
    """Least powers of two that are not below the magnitudes of x, float32, from 2**-126 to 2**127.

    These are the normal ones: 0 gives the least; larger magnitudes, Inf and NaN give the largest.
    """
    bits = x.abs().to(torch.float32).view(torch.int32)
    exponents = (bits >> _MANTISSA_BITS) + (bits & ((1 << _MANTISSA_BITS) - 1) != 0)
    return (exponents.clamp(1, 254) << _MANTISSA_BITS).view(torch.float32)


def pack_ue8m0_to_int(x: Tensor) -> Tensor:
    """Powers of two x (..., B) as int32 (..., ceil(B / 4)): four exponents in each, the first lowest."""
    return numbers.pack(x)


def unpack_ue8m0_from_int(packed_sf: Tensor) -> Tensor:
    """Powers of two (..., 4 B) float32 from packed ones (..., B) int32; an absent exponent, 0, gives 0."""
    exponents = torch.stack([(packed_sf >> shift) & 255 for shift in (0, 8, 16, 24)], -1).flatten(-2)
    return (exponents << _MANTISSA_BITS).view(torch.float32)


def cast_back_from_fp8(x: Tensor, sf: Tensor, gran_k: int = 128, use_packed_ue8m0: bool = False) -> Tensor:
    """x * its scales in float32, for x (M, N) e4m3 with scales (M, ceil(N / gran_k)), packed four in an int32 or not.

    Raises InputError if there are fewer scales than blocks of a row.
    """
    _two_dimensions("cast_back_from_fp8", x)
    scales = unpack_ue8m0_from_int(sf) if use_packed_ue8m0 else sf
    rows, columns = x.shape
    blocks = ceil_div(columns, gran_k)
    if scales.dim() != 2 or scales.shape[0] != rows or scales.shape[1] < blocks:
        raise InputError(f"cast_back_from_fp8: sf is {tuple(sf.shape)}; {tuple(x.shape)} has {(rows, blocks)} scales.")
    return numbers.restore(x, scales[:, :blocks], _rows_of(1, gran_k), torch.float32)


def _rows_of(rows: int, columns: int) -> ScaleLayout:
    return ScaleLayout(rows, columns, along_rows=False, alignment=1)


def _row_major(cast: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return cast[0], cast[1].contiguous()


def _two_dimensions(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or x.dim() != 2:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"{name}: x is {got}; needs two dimensions. Batches: tilewright.ops.{name}.")
