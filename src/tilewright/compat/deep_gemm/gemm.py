"""Dense bf16 products with DeepGEMM's signatures: D = C + A @ B, written into the caller's D.

The two letters say how A, then B, are passed: "n" as in the product A (M, K) @ B (K, N), "t"
transposed.
"""

from typing import Any

import torch
from torch import Tensor

from tilewright.compat.deep_gemm import arguments
from tilewright.ops.gemm.matmul import matmul
from tilewright.ops.gemm.scaled_matmul import scaled_matmul


def bf16_gemm_nt(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    c: Tensor | None = None,
    compiled_dims: str = "nk",
    alpha: float | None = None,
) -> None:
    """d = c + alpha * a @ b.T, in float32 and rounded once.

    a: (M, K) bf16.   b: (N, K) bf16; either may have any row or column stride, if its other stride is 1.
    d: (M, N) bf16|fp32, columns contiguous; overwritten.   c: like d; may be d itself, which then accumulates.
    compiled_dims: accepted for compatibility, without effect: each kernel decides the sizes it is compiled for.
    Raises InputError for other shapes, dtypes or layouts, and if a gradient would be lost.
    """
    _gemm("bf16_gemm_nt", a, b, d, c, compiled_dims, alpha)


def bf16_gemm_nn(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    c: Tensor | None = None,
    compiled_dims: str = "nk",
    alpha: float | None = None,
) -> None:
    """`bf16_gemm_nt` for a (M, K) and b (K, N)."""
    _gemm("bf16_gemm_nn", a, b, d, c, compiled_dims, alpha)


def bf16_gemm_tn(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    c: Tensor | None = None,
    compiled_dims: str = "mn",
    alpha: float | None = None,
) -> None:
    """`bf16_gemm_nt` for a (K, M) and b (K, N): the weight gradient of a linear layer."""
    _gemm("bf16_gemm_tn", a, b, d, c, compiled_dims, alpha)


def bf16_gemm_tt(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    c: Tensor | None = None,
    compiled_dims: str = "mn",
    alpha: float | None = None,
) -> None:
    """`bf16_gemm_nt` for a (K, M) and b (N, K)."""
    _gemm("bf16_gemm_tt", a, b, d, c, compiled_dims, alpha)


def cublaslt_gemm_nt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """`bf16_gemm_nt` by torch's own product, which on a GPU is cuBLAS's: for comparisons.

    a and b may be e4m3, which counts without scales.
    """
    _gemm("cublaslt_gemm_nt", a, b, d, c, "", None, "torch")


def cublaslt_gemm_nn(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """`cublaslt_gemm_nt` for b (K, N)."""
    _gemm("cublaslt_gemm_nn", a, b, d, c, "", None, "torch")


def cublaslt_gemm_tn(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """`cublaslt_gemm_nt` for a (K, M) and b (K, N)."""
    _gemm("cublaslt_gemm_tn", a, b, d, c, "", None, "torch")


def cublaslt_gemm_tt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """`cublaslt_gemm_nt` for a (K, M)."""
    _gemm("cublaslt_gemm_tt", a, b, d, c, "", None, "torch")


def _gemm(
    name: str,
    a: Tensor,
    b: Tensor,
    d: Tensor,
    c: Tensor | None,
    compiled_dims: str,
    alpha: float | None,
    backend: str | None = None,
) -> None:
    trans_a, trans_b = name[-2] == "t", name[-1] == "t"
    arguments.same_device(name, c, a=a, b=b, d=d)
    arguments.dimensions(name, 2, a=a, b=b, d=d)
    float8 = backend is not None and a.dtype == arguments.E4M3
    arguments.operands(name, arguments.E4M3 if float8 else arguments.BF16, a, b)
    m, k = a.shape[::-1] if trans_a else a.shape
    k_b, n = b.shape[::-1] if trans_b else b.shape
    a_form, b_form = ("(K, M)" if trans_a else "(M, K)"), ("(N, K)" if trans_b else "(K, N)")
    arguments.same_depth(name, a, b, a_form, b_form, k, k_b)
    arguments.result(name, d, (m, n), "(M, N)")
    arguments.summand(name, c, d)
    arguments.compiled(name, compiled_dims)
    if arguments.is_settled(name, a, b, c, d, k):
        return
    scale = 1.0 if alpha is None else alpha
    options: dict[str, Any] = {"trans_a": trans_a, "trans_b": trans_b, "out_dtype": d.dtype, "out": d}
    if float8:
        one = d.new_ones((1, 1), dtype=torch.float32)
        scaled_matmul(a, b, one, one, c=c, alpha=scale, backend=backend, **options)
    else:
        matmul(a, b, c=c, alpha=scale, backend=backend, **options)
