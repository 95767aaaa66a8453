"""Products summed over groups of rows, with DeepGEMM's signatures: gradients of experts' weights.

Lists of sizes on the host are only checked: kernels read the sizes on the device.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.compat.deep_gemm import arguments
from tilewright.compat.deep_gemm.arguments import Pair
from tilewright.errors import InputError
from tilewright.log import log_once
from tilewright.ops.gemm.k_grouped_matmul import k_grouped_matmul
from tilewright.ops.quant.layout import TOKEN

_BLOCK = 128  # elements along K that share a scale: groups of float8 end at multiples of it
_RECIPE = (1, 1, _BLOCK)
_FORMER_NAMES = arguments.also(ks="ks_cpu", ks_tensor="grouped_layout")


@_FORMER_NAMES
def k_grouped_bf16_gemm_tn_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    ks_cpu: Sequence[int] | None,
    grouped_layout: Tensor,
    c: Tensor | None = None,
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
) -> None:
    """d[g] = c[g] + a[rows of g].T @ b[rows of g] for every group g, accumulated in float32.

    a: (T, M) bf16.   b: (T, N) bf16.   d: (G, M, N) bf16|fp32.   c: like d, may be d itself; None counts as zeros.
    ks_cpu: sizes of the groups, in order and without gaps, or None; grouped_layout: (G,) int32, the same on the device
    of a, which kernels read.  The former names ks and ks_tensor are accepted.
    compiled_dims: without effect.   use_psum_layout: False, as on Hopper.
    Raises InputError for other shapes, dtypes or layouts, and if a gradient would be lost.
    """
    name = "k_grouped_bf16_gemm_tn_contiguous"
    arguments.same_device(name, c, a=a, b=b, d=d, grouped_layout=grouped_layout)
    arguments.dimensions(name, 2, a=a, b=b)
    arguments.operands(name, arguments.BF16, a, b)
    (t, m), (t_b, n) = a.shape, b.shape
    arguments.same_depth(name, a, b, "(T, M)", "(T, N)", t, t_b)
    _results(name, d, c, m, n, compiled_dims)
    _sizes(name, ks_cpu, grouped_layout, d, t, 1, use_psum_layout)
    _product(a.mT, b.mT, None, None, d, c, grouped_layout)


@_FORMER_NAMES
def k_grouped_fp8_gemm_tn_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    ks_cpu: Sequence[int] | None,
    grouped_layout: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] = _RECIPE,
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
) -> None:
    """`k_grouped_bf16_gemm_tn_contiguous` with float8 operands: groups of multiples of 128 rows.

    a: (T, M) e4m3 and (T/128, M) float32, as `per_channel_cast_to_fp8` makes them.   b: (T, N) and (T/128, N).
    Tensor cores read float8 along T: both are transposed in each call, which is logged once.
    """
    name = "k_grouped_fp8_gemm_tn_contiguous"
    (left, scale_a), (right, scale_b) = arguments.pair(name, "a", a), arguments.pair(name, "b", b)
    arguments.same_device(
        name, c, a=left, b=right, d=d, grouped_layout=grouped_layout, scales_a=scale_a, scales_b=scale_b
    )
    arguments.dimensions(name, 2, a=left, b=right, scales_of_a=scale_a, scales_of_b=scale_b)
    arguments.operands(name, arguments.E4M3, left, right)
    (t, m), (t_b, n) = left.shape, right.shape
    arguments.same_depth(name, left, right, "(T, M)", "(T, N)", t, t_b)
    _results(name, d, c, m, n, compiled_dims)
    _sizes(name, ks_cpu, grouped_layout, d, t, _BLOCK, use_psum_layout)
    _scales(name, recipe, scale_a.mT, scale_b.mT, m, n, t)
    _log_copy(name)
    _product(left.mT.contiguous(), right.mT.contiguous(), scale_a.mT, scale_b.mT, d, c, grouped_layout)


@_FORMER_NAMES
def k_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    ks_cpu: Sequence[int],
    grouped_layout: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] = _RECIPE,
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
) -> None:
    """d[g] = c[g] + a_g @ b_g.T for every group g, with a_g (M, K_g) and b_g (N, K_g) one after the other.

    a: (M * T,) e4m3, T = sum(K_g), every a_g contiguous, and (M, T/128) float32.   b: (N * T,) and (N, T/128).
    d: (G, M, N) bf16|fp32.   c: like d, may be d itself; None counts as zeros.
    ks_cpu: the K_g, multiples of 128; grouped_layout: (G,) int32, the same on the device of a.   recipe: (1, 1, 128).
    compiled_dims, use_psum_layout: as in `k_grouped_bf16_gemm_tn_contiguous`.
    Each call concatenates the groups to (M, T) and (N, T), which is logged once: the form that
    `ops.quant.per_channel_cast_to_fp8(x, transpose=True)` returns and `tilewright.ops.k_grouped_matmul` takes.
    """
    name = "k_grouped_fp8_gemm_nt_contiguous"
    (left, scale_a), (right, scale_b) = arguments.pair(name, "a", a), arguments.pair(name, "b", b)
    arguments.same_device(
        name, c, a=left, b=right, d=d, grouped_layout=grouped_layout, scales_a=scale_a, scales_b=scale_b
    )
    arguments.dimensions(name, 3, d=d)
    arguments.dimensions(name, 2, scales_of_a=scale_a, scales_of_b=scale_b)
    (_, m, n), t = d.shape, sum(ks_cpu)
    _results(name, d, c, m, n, compiled_dims)
    _sizes(name, ks_cpu, grouped_layout, d, t, _BLOCK, use_psum_layout)
    for key, q, rows in (("a", left, m), ("b", right, n)):
        if q.dtype != arguments.E4M3 or not q.is_contiguous() or q.numel() != rows * t:
            raise InputError(
                f"{name}: {key} is {tuple(q.shape)} {q.dtype} with strides {q.stride()}; needs {rows * t} contiguous "
                f"float8_e4m3fn, {rows} rows of each of ks_cpu={list(ks_cpu)}."
            )
    _scales(name, recipe, scale_a, scale_b, m, n, t)
    _log_copy(name)
    _product(_concatenate(left, m, ks_cpu), _concatenate(right, n, ks_cpu), scale_a, scale_b, d, c, grouped_layout)


def _product(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    d: Tensor,
    c: Tensor | None,
    ks_tensor: Tensor,
) -> None:
    """The product of a (M, T) and b (N, T), with scales (M, T/128) and (N, T/128), into d."""
    if d.numel() == 0:
        return
    if scale_a is not None and scale_b is not None:
        scale_a = arguments.laid_out("k_grouped_fp8_gemm", "a", scale_a, TOKEN, *a.shape)
        scale_b = arguments.laid_out("k_grouped_fp8_gemm", "b", scale_b, TOKEN, *b.shape)
    ends = ks_tensor.cumsum(0, dtype=torch.int32)
    k_grouped_matmul(a, b, ends, c=c, scale_a=scale_a, scale_b=scale_b, trans_b=True, out_dtype=d.dtype, out=d)


def _log_copy(name: str) -> None:
    if not torch.compiler.is_compiling():  # a log cannot be traced
        log_once(
            ("compat", name),
            f"{name}: each call copies a and b so that all groups lie side by side along K. "
            "ops.quant.per_channel_cast_to_fp8 with transpose=True and ops.gemm.k_grouped_matmul need no copy.",
        )


def _concatenate(flat: Tensor, rows: int, ks: Sequence[int]) -> Tensor:
    """Concatenate matrices (rows, k), one after the other in `flat`, to (rows, T): one launch copies all bytes."""
    parts = flat.view(torch.uint8).view(-1).split([rows * k for k in ks])
    shaped = [part.view(rows, k) for part, k in zip(parts, ks, strict=True) if k]
    return torch.cat(shaped, 1).view(flat.dtype) if shaped else flat.view(rows, 0)


def _results(name: str, d: Tensor, c: Tensor | None, m: int, n: int, compiled_dims: str) -> None:
    arguments.dimensions(name, 3, d=d)
    arguments.result(name, d, (d.shape[0], m, n), "(G, M, N)")
    arguments.summand(name, c, d)
    arguments.compiled(name, compiled_dims)


def _scales(name: str, recipe: Any, scale_a: Tensor, scale_b: Tensor, m: int, n: int, t: int) -> None:
    if tuple(recipe) != _RECIPE:
        raise InputError(f"{name}: recipe is {recipe}; Hopper's weight gradients have {_RECIPE}.")
    arguments.scales(name, "a", scale_a, TOKEN, m, t, ())
    arguments.scales(name, "b", scale_b, TOKEN, n, t, ())


def _sizes(
    name: str, ks: Sequence[int] | None, grouped_layout: Tensor, d: Tensor, t: int, unit: int, use_psum_layout: bool
) -> None:
    groups = d.shape[0]
    if use_psum_layout:
        raise InputError(f"{name}: use_psum_layout=True; on Hopper grouped_layout holds the sizes of groups along K.")
    if grouped_layout.dtype != torch.int32 or tuple(grouped_layout.shape) != (groups,):
        raise InputError(
            f"{name}: grouped_layout is {tuple(grouped_layout.shape)} {grouped_layout.dtype}; needs ({groups},) "
            "torch.int32, the size of each group of d."
        )
    if ks is None:
        return
    if len(ks) != groups or sum(ks) != t or min(ks, default=0) < 0 or any(k % unit for k in ks):
        multiples = f", each a multiple of {unit}" if unit > 1 else ""
        raise InputError(f"{name}: ks_cpu is {list(ks)}; needs {groups} sizes of groups, together {t}{multiples}.")
