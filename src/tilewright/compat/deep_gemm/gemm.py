"""Dense bf16 products with DeepGEMM's signatures: D = C + A @ B, written into the caller's D.

The two letters say how A, then B, lie in memory as they are passed: "n" as in the product A (M, K) @ B (K, N), "t"
transposed.
"""

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops.gemm.matmul import matmul

_OUTPUTS = (torch.bfloat16, torch.float32)
_SIZES = frozenset("mnk")


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
    compiled_dims: accepted for DeepGEMM's sake; which sizes a kernel is compiled for is its own affair here.
    Raises InputError for other shapes, dtypes or layouts, and where a gradient would be lost.
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


def _gemm(
    name: str, a: Tensor, b: Tensor, d: Tensor, c: Tensor | None, compiled_dims: str, alpha: float | None
) -> None:
    trans_a, trans_b = name[-2] == "t", name[-1] == "t"
    _check(name, a, b, d, c, trans_a, trans_b)
    if not _SIZES.issuperset(compiled_dims):
        raise InputError(f'{name}: compiled_dims is {compiled_dims!r}; needs letters of "mnk".')
    if d.numel() == 0:
        return
    matmul(
        a,
        b,
        c=c,
        alpha=1.0 if alpha is None else alpha,
        trans_a=trans_a,
        trans_b=trans_b,
        out_dtype=d.dtype,
        out=d,
    )


def _check(name: str, a: Tensor, b: Tensor, d: Tensor, c: Tensor | None, trans_a: bool, trans_b: bool) -> None:
    """Raises InputError for what the docstring of `bf16_gemm_nt` excludes."""
    tensors = {"a": a, "b": b, "d": d} if c is None else {"a": a, "b": b, "d": d, "c": c}
    for key, t in tensors.items():
        if not isinstance(t, Tensor):
            raise InputError(f"{name}: {key} is a {type(t).__name__}; needs a torch.Tensor.")
        if t.dim() != 2:
            raise InputError(f"{name}: {key} is {tuple(t.shape)}; needs two dimensions.")
        if t.device != a.device:
            raise InputError(f"{name}: {key} is on {t.device}, a on {a.device}. Move them to one device.")
    for key, t in (("a", a), ("b", b)):
        if t.dtype != torch.bfloat16:
            raise InputError(
                f"{name}: {key} is {t.dtype}; needs torch.bfloat16. Cast it, or call tilewright.ops.matmul."
            )
        if 1 not in t.stride():
            raise InputError(
                f"{name}: {key} has strides {tuple(t.stride())}; one has to be 1. Call {key}.contiguous() first."
            )
    m, k = a.shape[::-1] if trans_a else a.shape
    k_b, n = b.shape[::-1] if trans_b else b.shape
    if k != k_b:
        raise InputError(
            f"{name}: a is {tuple(a.shape)} {'(K, M)' if trans_a else '(M, K)'}, b is {tuple(b.shape)} "
            f"{'(N, K)' if trans_b else '(K, N)'}; K is {k} in one and {k_b} in the other."
        )
    if tuple(d.shape) != (m, n):
        raise InputError(f"{name}: d is {tuple(d.shape)}; needs (M, N) = {(m, n)}.")
    if d.dtype not in _OUTPUTS:
        raise InputError(f"{name}: d is {d.dtype}; needs torch.bfloat16 or torch.float32.")
    if c is not None and (c.shape != d.shape or c.dtype != d.dtype):
        raise InputError(
            f"{name}: c is {tuple(c.shape)} {c.dtype}, d is {tuple(d.shape)} {d.dtype}; they need one shape and dtype."
        )
    for key in ("d", "c"):
        if key in tensors and not _rows_contiguous(tensors[key]):
            strides = tuple(tensors[key].stride())
            raise InputError(f"{name}: {key} has strides {strides}; needs contiguous rows, one after the other.")
    if torch.compiler.is_compiling() or c is None:  # addresses are for later
        return
    if c.data_ptr() == d.data_ptr() and c.stride() != d.stride():
        raise InputError(f"{name}: c begins where d does, with strides {c.stride()} beside {d.stride()}. Pass d as c.")


def _rows_contiguous(t: Tensor) -> bool:
    rows, columns = t.shape
    return (columns <= 1 or t.stride(1) == 1) and (rows <= 1 or t.stride(0) >= columns)
