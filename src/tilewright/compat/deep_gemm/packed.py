"""Powers of two as scales in Blackwell's layout: UE8M0 exponents, four in an int32, consecutive rows adjacent.

Plain torch on every device, for code that prepares such scales; products on Hopper read float32.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tilewright.compat.deep_gemm import arguments
from tilewright.compat.deep_gemm.sizes import ceil_div
from tilewright.errors import InputError
from tilewright.ops.quant import numbers
from tilewright.ops.quant.layout import TOKEN_UE8M0

_PER_WORD = 4


def get_mn_major_tma_aligned_packed_ue8m0_tensor(sf: Tensor, psum_layout: Tensor | None = None) -> Tensor:
    """Exponents of sf (..., rows, K blocks) float32, packed to (..., rows, ceil(K blocks / 4)) int32.

    Consecutive rows are adjacent, in lines of a multiple of 16 bytes.  Bits below the exponent are dropped:
    `ceil_to_ue8m0` rounds up first.   psum_layout: (G,) int32, ends of groups of rows; rows between groups are
    packed too.
    Raises InputError for other dtypes and ranks.
    """
    name = "get_mn_major_tma_aligned_packed_ue8m0_tensor"
    arguments.same_device(name, sf=sf)
    if sf.dim() not in (2, 3) or sf.dtype != torch.float32:
        raise InputError(f"{name}: sf is {tuple(sf.shape)} {sf.dtype}; needs two or three dimensions of torch.float32.")
    if psum_layout is not None:
        arguments.same_device(name, sf=sf, psum_layout=psum_layout)
    *batch, rows, blocks = sf.shape
    return TOKEN_UE8M0.empty(rows, TOKEN_UE8M0.depth * blocks, sf.device, *batch).copy_(numbers.pack(sf))


@arguments.also(ks="ks_cpu", ks_tensor="grouped_layout")
def get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
    sf: Tensor,
    grouped_layout: Tensor,
    ks_cpu: Sequence[int],
    gran_k: int,
    k_alignment: int | None = None,
    use_psum_layout: bool = False,
) -> Tensor:
    """Exponents of sf (sum of K_g / gran_k, rows) float32, packed along K in each group separately.

    Returns (sum of ceil(K_g / (4 * gran_k)), rows) int32; the last word of a group has zeros where blocks are missing.
    grouped_layout: (G,) int32, the sizes K_g on the device of sf; ks_cpu: the same on the host, which is read.   The
    former names ks_tensor and ks are accepted.   gran_k: elements that share a scale.   k_alignment: a divisor of the
    sizes, checked if given.   use_psum_layout: False, as on Hopper.
    Raises InputError for other dtypes and shapes, and for sizes that do not fit.
    """
    name = "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor"
    arguments.same_device(name, sf=sf, grouped_layout=grouped_layout)
    if use_psum_layout or ks_cpu is None:
        raise InputError(f"{name}: needs ks_cpu and use_psum_layout=False; ends of groups along K are Blackwell's.")
    if sf.dim() != 2 or sf.dtype != torch.float32:
        raise InputError(f"{name}: sf is {tuple(sf.shape)} {sf.dtype}; needs two dimensions of torch.float32.")
    if grouped_layout.dtype != torch.int32 or tuple(grouped_layout.shape) != (len(ks_cpu),):
        raise InputError(
            f"{name}: grouped_layout is {tuple(grouped_layout.shape)} {grouped_layout.dtype}; needs ({len(ks_cpu)},) "
            "torch.int32, the size of each group."
        )
    unit = k_alignment or gran_k
    blocks = [ceil_div(k, gran_k) for k in ks_cpu]
    if any(k < 0 or k % unit for k in ks_cpu) or sum(blocks) != sf.shape[0]:
        raise InputError(
            f"{name}: sf has {sf.shape[0]} rows of blocks and ks_cpu is {list(ks_cpu)}; needs multiples of {unit}, "
            f"with {gran_k} in each block."
        )
    ends = list(accumulate((ceil_div(count, _PER_WORD) for count in blocks), initial=0))
    result = sf.new_zeros((ends[-1], sf.shape[1]), dtype=torch.int32)
    for (start, end), exponents in zip(pairwise(ends), sf.split(blocks), strict=True):
        result[start:end] = numbers.pack(exponents.mT).mT
    return result
