"""Products of groups of rows with DeepGEMM's signatures: experts' layers, forward and for gradients of activations.

Sizes of groups are read on the device; no call synchronises.  Rows of padding after a group, up to the next multiple
of the alignment, are computed with it, so that zeros in a give zeros in d; other rows of d keep their values.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewright.compat.deep_gemm import arguments
from tilewright.compat.deep_gemm.arguments import Pair
from tilewright.compat.deep_gemm.dense_fp8 import Half, Recipe
from tilewright.compat.deep_gemm.layouts import get_mk_alignment_for_contiguous_layout
from tilewright.errors import InputError
from tilewright.ops.gemm.grouped_matmul import grouped_matmul
from tilewright.ops.gemm.groups_of_rows import groups_of_rows
from tilewright.ops.gemm.masked_matmul import masked_matmul
from tilewright.ops.quant.layout import ScaleLayout


def m_grouped_bf16_gemm_nt_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    grouped_layout: Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """d[rows of g] = a[rows of g] @ b[g].T for every group g.

    a: (T, K) bf16.   b: (G, N, K) bf16.   d: (T, N) bf16|fp32.
    grouped_layout: (T,) int32, the group of each row, -1 for padding, rows of a group next to each other; groups begin
    anywhere.  With use_psum_layout: (G,) int32, the end row of each group; a group begins at the previous end, rounded
    up to `get_mk_alignment_for_contiguous_layout()`.  Rows in between are computed with the group before them; rows
    after the last multiple are not touched.
    compiled_dims, ensure_zero_padding, expected_m_for_psum_layout: accepted for compatibility, without effect.
    Raises InputError for other shapes, dtypes or layouts, and if a gradient would be lost.
    """
    name = "m_grouped_bf16_gemm_nt_contiguous"
    _contiguous(name, _Operands(a, b), d, grouped_layout, compiled_dims, use_psum_layout)


def m_grouped_bf16_gemm_nn_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    grouped_layout: Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
) -> None:
    """`m_grouped_bf16_gemm_nt_contiguous` for b (G, K, N)."""
    name = "m_grouped_bf16_gemm_nn_contiguous"
    _contiguous(name, _Operands(a, b), d, grouped_layout, compiled_dims, use_psum_layout)


def m_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    grouped_layout: Tensor,
    recipe: Recipe = None,
    recipe_a: Half = None,
    recipe_b: Half = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """`m_grouped_bf16_gemm_nt_contiguous` with float8 operands.

    a: (T, K) e4m3 and (T, ceil(K/128)) float32.   b: (G, N, K) e4m3 and (G, ceil(N/128), ceil(K/128)) float32.
    recipes, disable_ue8m0_cast: as in `fp8_gemm_nt`.
    """
    name = "m_grouped_fp8_gemm_nt_contiguous"
    operands = _float8_operands(name, a, b, recipe, recipe_a, recipe_b)
    _contiguous(name, operands, d, grouped_layout, compiled_dims, use_psum_layout)


def m_grouped_fp8_gemm_nn_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    grouped_layout: Tensor,
    recipe: Recipe = None,
    recipe_a: Half = None,
    recipe_b: Half = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
) -> None:
    """`m_grouped_fp8_gemm_nt_contiguous` for b (G, K, N) and its scales (G, ceil(K/128), ceil(N/128)).

    Tensor cores read float8 along K, in which b is not contiguous: the nt form is the fast one.
    """
    name = "m_grouped_fp8_gemm_nn_contiguous"
    operands = _float8_operands(name, a, b, recipe, recipe_a, recipe_b)
    _contiguous(name, operands, d, grouped_layout, compiled_dims, use_psum_layout)


def m_grouped_bf16_gemm_nt_masked(
    a: Tensor, b: Tensor, d: Tensor, masked_m: Tensor, expected_m: int, compiled_dims: str = "nk"
) -> None:
    """d[g, :masked_m[g]] = a[g, :masked_m[g]] @ b[g].T for every group g; later rows are not touched.

    a: (G, Mmax, K) bf16.   b: (G, N, K) bf16.   d: (G, Mmax, N) bf16|fp32.   masked_m: (G,) int32 on the device.
    expected_m: the usual number of rows of a group; kernels are chosen by it.   compiled_dims: without effect.
    """
    _masked("m_grouped_bf16_gemm_nt_masked", _Operands(a, b), d, masked_m, expected_m, compiled_dims)


def m_grouped_fp8_gemm_nt_masked(
    a: Pair,
    b: Pair,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,
    recipe: Recipe = None,
    recipe_a: Half = None,
    recipe_b: Half = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """`m_grouped_bf16_gemm_nt_masked` with float8 operands.

    a: (G, Mmax, K) e4m3 and (G, Mmax, ceil(K/128)) float32.   b: (G, N, K) e4m3 and (G, ceil(N/128), ceil(K/128)).
    recipes, disable_ue8m0_cast: as in `fp8_gemm_nt`.
    """
    name = "m_grouped_fp8_gemm_nt_masked"
    operands = _float8_operands(name, a, b, recipe, recipe_a, recipe_b)
    _masked(name, operands, d, masked_m, expected_m, compiled_dims)


class _Operands(NamedTuple):
    """Both operands as passed, and their scales with the layouts of the recipe."""

    a: Tensor
    b: Tensor
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    layouts: tuple[ScaleLayout, ScaleLayout] | None = None


def _float8_operands(name: str, a: Any, b: Any, recipe: Recipe, recipe_a: Half, recipe_b: Half) -> _Operands:
    layouts = arguments.granularities(name, recipe, recipe_a, recipe_b)
    (left, scale_a), (right, scale_b) = arguments.pair(name, "a", a), arguments.pair(name, "b", b)
    return _Operands(left, right, scale_a, scale_b, layouts)


def _contiguous(name: str, operands: _Operands, d: Tensor, layout: Tensor, compiled_dims: str, psum: bool) -> None:
    a, b, scale_a, scale_b = _check(name, operands, d, 2, compiled_dims)
    groups = b.shape[0]
    _check_sizes(name, "grouped_layout", layout, a, groups if psum else a.shape[0], "group" if psum else "row")
    if groups == 0:
        return
    starts, ends = _padded_ends(layout, a.shape[0]) if psum else _padded_ids(layout, groups)
    if arguments.is_settled(name, a, b, None, d, a.shape[1]):
        return
    grouped_matmul(a, b, ends, starts=starts, scale_a=scale_a, scale_b=scale_b, trans_b=True, out_dtype=d.dtype, out=d)


def _masked(name: str, operands: _Operands, d: Tensor, masked_m: Tensor, expected_m: int, compiled_dims: str) -> None:
    a, b, scale_a, scale_b = _check(name, operands, d, 3, compiled_dims)
    _check_sizes(name, "masked_m", masked_m, a, b.shape[0], "group")
    if not isinstance(expected_m, int) or expected_m < 1:
        raise InputError(f"{name}: expected_m is {expected_m!r}; needs a number of rows, at least 1.")
    if arguments.is_settled(name, a, b, None, d, a.shape[-1]):
        return
    masked_matmul(
        a,
        b,
        masked_m,
        expected_rows=expected_m,
        scale_a=scale_a,
        scale_b=scale_b,
        trans_b=True,
        out_dtype=d.dtype,
        out=d,
    )


def _check(
    name: str, operands: _Operands, d: Tensor, dims: int, compiled_dims: str
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Check all arguments.  Returns a (..., M, K), b (G, N, K) and their scales in the layouts of kernels."""
    a, b, scale_a, scale_b, layouts = operands
    scale_tensors = {} if layouts is None else {"scales_of_a": scale_a, "scales_of_b": scale_b}
    arguments.same_device(name, a=a, b=b, d=d, **scale_tensors)
    arguments.dimensions(name, dims, a=a, d=d)
    arguments.dimensions(name, 3, b=b)
    arguments.operands(name, arguments.BF16 if layouts is None else arguments.E4M3, a, b)
    if "_nn_" in name:
        b, scale_b = b.mT, None if scale_b is None or scale_b.dim() < 2 else scale_b.mT
    (*batch, m, k), (groups, n, k_b) = a.shape, b.shape
    if batch and batch != [groups]:
        raise InputError(f"{name}: a has {batch[0]} groups, b has {groups}.")
    arguments.same_depth(name, a, b, "(G, Mmax, K)" if batch else "(T, K)", "(G, N, K)", k, k_b)
    arguments.result(name, d, (*batch, m, n), "(G, Mmax, N)" if batch else "(T, N)")
    arguments.compiled(name, compiled_dims)
    if layouts is not None:
        arguments.scales(name, "a", scale_a, layouts[0], m, k, batch)
        arguments.scales(name, "b", scale_b, layouts[1], n, k, (groups,))
        if scale_a is not None and scale_b is not None and d.numel() and k:
            scale_a = arguments.laid_out(name, "a", scale_a, layouts[0], m, k)
            scale_b = arguments.laid_out(name, "b", scale_b, layouts[1], n, k)
    return a, b, scale_a, scale_b


def _check_sizes(name: str, key: str, t: Any, a: Tensor, count: int, what: str) -> None:
    arguments.same_device(name, **{"a": a, key: t})
    if t.dtype != torch.int32 or tuple(t.shape) != (count,):
        other = "" if key == "masked_m" else ", or use_psum_layout the other way round"
        raise InputError(
            f"{name}: {key} is {tuple(t.shape)} {t.dtype}; needs ({count},) torch.int32, one number a {what}{other}."
        )


def _padded_ends(ends: Tensor, rows: int) -> tuple[Tensor | None, Tensor]:
    """(starts, ends) of groups that end at `ends`: each begins where the padding of the previous one ends, at a
    multiple of the alignment.
    """
    alignment = get_mk_alignment_for_contiguous_layout()
    if alignment == 1:
        return None, ends
    rounded = _round_up(ends, alignment)
    return pad(rounded[:-1], (1, 0)), rounded.clamp_(max=rows)


def _padded_ids(ids: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """(starts, ends) of groups with the padding after them, up to a multiple of the alignment or the next group."""
    starts, ends = groups_of_rows(ids, groups)
    alignment, rows = get_mk_alignment_for_contiguous_layout(), ids.shape[0]
    if alignment == 1 or rows == 0:
        return starts, ends
    # Groups are in any order, so search for the next one; an empty group stays (0, 0) and is never the next
    following = torch.where(starts >= ends[:, None], starts, rows).amin(1)
    return starts, torch.minimum(_round_up(ends, alignment), following)


def _round_up(ends: Tensor, alignment: int) -> Tensor:
    above = ends + (alignment - 1)
    if alignment & (alignment - 1) == 0:
        return above.bitwise_and_(-alignment)
    return above.div_(alignment, rounding_mode="floor").mul_(alignment)
