"""Layouts of scales, and the alignment of groups, with DeepGEMM's names."""

from typing import Any

import torch
from torch import Tensor

from tilewright.compat.deep_gemm import arguments
from tilewright.errors import InputError
from tilewright.ops.quant.layout import BLOCK, TOKEN

_HOPPER = 128
_alignment = [_HOPPER]


def get_mk_alignment_for_contiguous_layout() -> int:
    """The number of rows that groups are padded to a multiple of: 128, as on Hopper, unless it is set."""
    return _alignment[0]


def set_mk_alignment_for_contiguous_layout(new_value: int) -> None:
    """Set the alignment of groups: their begin under use_psum_layout, and the padding of code that reads it.

    Kernels here take groups that begin anywhere: 1 saves the padding.  Groups along K of float8 still end at multiples
    of 128.  Rows of padding up to the next multiple are computed with the group before them.
    """
    if not isinstance(new_value, int) or new_value < 1:
        raise InputError(f"set_mk_alignment_for_contiguous_layout({new_value!r}): needs a number of rows, at least 1.")
    _alignment[0] = new_value


def get_theoretical_mk_alignment_for_contiguous_layout(
    expected_m: int | None = None, num_groups: int | None = None
) -> int:
    """128, as on Hopper for any number of rows."""
    return _HOPPER


def get_mn_major_tma_aligned_tensor(sf: Tensor) -> Tensor:
    """Scales sf (..., rows, K blocks) float32 with consecutive rows adjacent, in lines of a multiple of 16 bytes.

    Returns `sf` itself if it has this layout, else a copy.
    """
    name = "get_mn_major_tma_aligned_tensor"
    arguments.same_device(name, sf=sf)
    if sf.dim() not in (2, 3) or sf.dtype != torch.float32:
        raise InputError(f"{name}: sf is {tuple(sf.shape)} {sf.dtype}; needs two or three dimensions of torch.float32.")
    aligned = TOKEN.empty(sf.shape[-2], TOKEN.depth * sf.shape[-1], sf.device, *sf.shape[:-2])
    return sf if sf.stride() == aligned.stride() else aligned.copy_(sf)


def transform_sf_into_required_layout(
    sf: Tensor,
    mn: int,
    k: int,
    recipe: tuple[int, ...],
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    psum_layout: Tensor | None = None,
) -> Tensor:
    """The scales of a (num_groups, mn, k) or (mn, k) operand in the layout of Hopper's kernels.

    recipe: (rows of a, rows of b, K) with is_sfa for a; or (rows, K).   1x128: see
    `get_mn_major_tma_aligned_tensor`; 128x128: `sf` itself.   disable_ue8m0_cast, and psum_layout, the ends of groups
    of rows: without effect.
    Raises InputError for scales of another shape or dtype, and other granularities.
    """
    name = "transform_sf_into_required_layout"
    layout = _granularity(name, recipe, is_sfa)
    arguments.same_device(name, sf=sf)
    batch = () if num_groups is None else (num_groups,)
    arguments.scales(name, "the operand", sf, layout, mn, k, batch)
    return get_mn_major_tma_aligned_tensor(sf) if layout is TOKEN else sf


def _granularity(name: str, recipe: Any, is_sfa: bool | None) -> Any:
    if (len(recipe) == 3) != (is_sfa is not None):
        raise InputError(f"{name}: recipe={recipe} with is_sfa={is_sfa}; is_sfa goes with recipes of three numbers.")
    if len(recipe) == 3:
        recipe = (recipe[0] if is_sfa else recipe[1], recipe[2])
    layout = {(1, 128): TOKEN, (128, 128): BLOCK}.get(tuple(recipe))
    if layout is None:
        raise InputError(f"{name}: scales of {recipe} elements; Hopper has (1, 128) and (128, 128).")
    return layout
