"""DeepGEMM's `legacy`: bf16 products of groups for older GPUs, with operands whose rows are gathered in the kernel.

Here they run on the kernels that `tilewright.ops` chooses.  Gathered rows are copied before the product.
"""

from typing import NoReturn

import torch
from torch import Tensor

from tilewright.compat.deep_gemm import absent, arguments
from tilewright.compat.deep_gemm.grouped import m_grouped_bf16_gemm_nt_contiguous
from tilewright.errors import InputError
from tilewright.ops.gemm.k_grouped_matmul import k_grouped_matmul

Handle = tuple[Tensor, Tensor, Tensor]
"""The row for each position along K, -1 for zeros; first and end position of each group."""

__all__ = [
    "a_fused_k_grouped_bf16_gemm_tn_contiguous_tl",
    "a_fused_m_grouped_bf16_gemm_nn_contiguous_tl",
    "a_fused_m_grouped_bf16_gemm_nt_contiguous_tl",
    "b_fused_k_grouped_bf16_gemm_tn_contiguous_tl",
    "m_grouped_bf16_gemm_nn_contiguous_tl",
    "m_grouped_bf16_gemm_nt_contiguous_tl",
]


def m_grouped_bf16_gemm_nt_contiguous_tl(a: Tensor, b: Tensor, d: Tensor, m_indices: Tensor) -> None:
    """`m_grouped_bf16_gemm_nt_contiguous` with the group of each row."""
    m_grouped_bf16_gemm_nt_contiguous(a, b, d, m_indices)


def m_grouped_bf16_gemm_nn_contiguous_tl(a: Tensor, b: Tensor, d: Tensor, m_indices: Tensor) -> None:
    """`m_grouped_bf16_gemm_nt_contiguous_tl` for b (G, K, N)."""
    m_grouped_bf16_gemm_nt_contiguous(a, _transposed("m_grouped_bf16_gemm_nn_contiguous_tl", b), d, m_indices)


def a_fused_m_grouped_bf16_gemm_nt_contiguous_tl(
    a: Tensor, b: Tensor, d: Tensor, mappings: tuple[Tensor, Tensor]
) -> None:
    """d[i] = a[rows[i]] @ b[groups[i]].T with (groups, rows) = mappings, (T,) int32 both; -1 among rows means zeros.

    a: (R, K) bf16.   b: (G, N, K) bf16.   d: (T, N) bf16|fp32.   groups: as in `m_grouped_bf16_gemm_nt_contiguous`.
    Raises InputError for other shapes and dtypes.  Indices outside of a are undefined on a GPU, as in DeepGEMM.
    """
    groups, rows = mappings
    m_grouped_bf16_gemm_nt_contiguous(_gather("a_fused_m_grouped_bf16_gemm", a, rows), b, d, groups)


def a_fused_m_grouped_bf16_gemm_nn_contiguous_tl(
    a: Tensor, b: Tensor, d: Tensor, mappings: tuple[Tensor, Tensor]
) -> None:
    """`a_fused_m_grouped_bf16_gemm_nt_contiguous_tl` for b (G, K, N)."""
    name = "a_fused_m_grouped_bf16_gemm_nn_contiguous_tl"
    a_fused_m_grouped_bf16_gemm_nt_contiguous_tl(a, _transposed(name, b), d, mappings)


def a_fused_k_grouped_bf16_gemm_tn_contiguous_tl(a: Tensor, b: Tensor, d: Tensor, handle: Handle, acc: bool) -> None:
    """d[g] = a[rows of g].T @ b[places of g] for every group g of (rows, starts, ends) = handle; with acc added to d.

    a: (R, M) bf16, gathered.   b: (T, N) bf16.   d: (G, M, N) bf16|fp32.   rows: (T,) int32, -1 for zeros.
    starts, ends: (G,) int32, places along T of each group, groups in order.
    Raises InputError for other shapes and dtypes.
    """
    rows, starts, ends = handle
    name = "a_fused_k_grouped_bf16_gemm_tn_contiguous_tl"
    _k_grouped(name, _gather(name, a, rows), b, d, starts, ends, acc)


def b_fused_k_grouped_bf16_gemm_tn_contiguous_tl(a: Tensor, b: Tensor, d: Tensor, handle: Handle, acc: bool) -> None:
    """`a_fused_k_grouped_bf16_gemm_tn_contiguous_tl` for a (T, M) and b (R, N), gathered."""
    rows, starts, ends = handle
    name = "b_fused_k_grouped_bf16_gemm_tn_contiguous_tl"
    _k_grouped(name, a, _gather(name, b, rows), d, starts, ends, acc)


def _k_grouped(name: str, a: Tensor, b: Tensor, d: Tensor, starts: Tensor, ends: Tensor, acc: bool) -> None:
    arguments.same_device(name, a=a, b=b, d=d, starts=starts, ends=ends)
    arguments.dimensions(name, 2, a=a, b=b)
    arguments.dimensions(name, 3, d=d)
    arguments.operands(name, arguments.BF16, a, b)
    (t, m), (t_b, n), groups = a.shape, b.shape, d.shape[0]
    arguments.same_depth(name, a, b, "(T, M)", "(T, N)", t, t_b)
    arguments.result(name, d, (groups, m, n), "(G, M, N)")
    for key, places in (("starts", starts), ("ends", ends)):
        if places.dtype != torch.int32 or tuple(places.shape) != (groups,):
            raise InputError(
                f"{name}: {key} is {tuple(places.shape)} {places.dtype}; needs ({groups},) torch.int32, one a group."
            )
    if d.numel() == 0:
        return
    last = ends.cummax(0).values  # an empty group may have any earlier end
    positions = torch.arange(t, dtype=torch.int32, device=a.device)
    group = torch.searchsorted(last, positions, right=True).clamp_(max=groups - 1)
    in_gap = positions < starts[group]
    a = a.masked_fill(in_gap[:, None], 0)
    b = b.masked_fill(in_gap[:, None], 0)
    k_grouped_matmul(a.mT, b.mT, last, c=d if acc else None, trans_b=True, out_dtype=d.dtype, out=d)


def _gather(name: str, t: Tensor, rows: Tensor) -> Tensor:
    """Rows `rows` (T,) of `t` (R, X): (T, X), zeros for -1."""
    arguments.same_device(name, operand=t, rows=rows)
    arguments.dimensions(name, 2, operand=t)
    arguments.dimensions(name, 1, rows=rows)
    if rows.dtype != torch.int32:
        raise InputError(f"{name}: rows are {rows.dtype}; needs torch.int32.")
    if not t.shape[0]:
        return t.new_zeros((rows.shape[0], t.shape[1]))
    return t.index_select(0, rows.clamp(min=0)).masked_fill_((rows < 0)[:, None], 0)


def _transposed(name: str, b: Tensor) -> Tensor:
    arguments.same_device(name, b=b)
    arguments.dimensions(name, 3, b=b)
    return b.mT


def __getattr__(name: str) -> NoReturn:
    raise absent.missing(__name__, name, __all__)
