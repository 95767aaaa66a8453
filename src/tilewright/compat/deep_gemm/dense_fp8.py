"""Dense float8 products with DeepGEMM's signatures: D = C + (A * its scales) @ (B * its scales), into the caller's D.

a and b are pairs (float8_e4m3fn, float32 scales).  The letters say how both of a pair are passed: "n" as in the
product A (M, K) @ B (K, N), "t" transposed, the scales like their operand.
"""

from typing import Any

from torch import Tensor

from tilewright.compat.deep_gemm import arguments
from tilewright.compat.deep_gemm.arguments import Pair
from tilewright.errors import InputError
from tilewright.ops.gemm.scaled_matmul import scaled_matmul

Recipe = tuple[int, int, int] | None
Half = tuple[int, int] | None


def fp8_gemm_nt(
    a: Pair,
    b: Pair,
    d: Tensor,
    c: Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: Half = None,
    recipe_b: Half = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
) -> None:
    """d = c + alpha * a @ b.T; the tensor core sums 128 products along K, the scaled sums are added in float32.

    a: (M, K) e4m3 and (M, ceil(K/128)) float32.   b: (N, K) e4m3 and (ceil(N/128), ceil(K/128)) float32, or with
    recipe=(1, 1, 128), as for weight gradients, (N, ceil(K/128)).   recipe_a and recipe_b: the same as
    (rows, K) of each operand.
    d: (M, N) bf16|fp32, columns contiguous; overwritten.   c: like d; may be d itself, which then accumulates.
    Scales 1x128 in the layout of `transform_sf_into_required_layout` are read in place; others are copied in each call,
    and so are operands that are not contiguous along K.  Both are logged once.
    compiled_dims, disable_ue8m0_cast: accepted for compatibility, without effect on Hopper's float32 scales.
    Raises InputError for other shapes, dtypes or layouts, and if a gradient would be lost.
    """
    _gemm("fp8_gemm_nt", a, b, d, c, recipe, recipe_a, recipe_b, compiled_dims, alpha)


def fp8_gemm_nn(
    a: Pair,
    b: Pair,
    d: Tensor,
    c: Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: Half = None,
    recipe_b: Half = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
) -> None:
    """`fp8_gemm_nt` for b (K, N)."""
    _gemm("fp8_gemm_nn", a, b, d, c, recipe, recipe_a, recipe_b, compiled_dims, alpha)


def fp8_gemm_tn(
    a: Pair,
    b: Pair,
    d: Tensor,
    c: Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: Half = None,
    recipe_b: Half = None,
    compiled_dims: str = "mn",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
) -> None:
    """`fp8_gemm_nt` for a (K, M) and b (K, N)."""
    _gemm("fp8_gemm_tn", a, b, d, c, recipe, recipe_a, recipe_b, compiled_dims, alpha)


def fp8_gemm_tt(
    a: Pair,
    b: Pair,
    d: Tensor,
    c: Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: Half = None,
    recipe_b: Half = None,
    compiled_dims: str = "mn",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
) -> None:
    """`fp8_gemm_nt` for a (K, M)."""
    _gemm("fp8_gemm_tt", a, b, d, c, recipe, recipe_a, recipe_b, compiled_dims, alpha)


def fp8_gemm_nt_skip_head_mid(
    a: Pair,
    b: Pair,
    d: Tensor,
    head_splits: tuple[int, int, int],
    recipe: Recipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """`fp8_gemm_nt` that leaves a gap in each head: with (left, mid, right) = head_splits the product has left + right
    columns a head, and the mid columns of d between them keep their values.

    b: (H * (left + right), K).   d: (M, H * (left + mid + right)) bf16|fp32, contiguous.   Others: see `fp8_gemm_nt`.
    The product has its own result, which is then copied into d: one more pass over it than DeepGEMM's.
    """
    name = "fp8_gemm_nt_skip_head_mid"
    left, mid, right = head_splits
    q, _ = arguments.pair(name, "b", b)
    arguments.same_device(name, b=q, d=d)
    arguments.dimensions(name, 2, b=q, d=d)
    if min(head_splits) < 0 or left + right == 0 or q.shape[0] % (left + right):
        raise InputError(f"{name}: b has {q.shape[0]} rows; with head_splits={head_splits} needs whole heads of them.")
    heads = q.shape[0] // (left + right)
    arguments.result(name, d, (d.shape[0], heads * (left + mid + right)), "(M, H * (left + mid + right))")
    product = d.new_empty(d.shape[0], q.shape[0])
    _gemm(name, a, b, product, None, recipe, None, None, compiled_dims, None)
    d_heads, product_heads = d.unflatten(1, (heads, left + mid + right)), product.unflatten(1, (heads, left + right))
    d_heads[..., :left].copy_(product_heads[..., :left])
    d_heads[..., left + mid :].copy_(product_heads[..., left:])


def _gemm(
    name: str,
    a: Any,
    b: Any,
    d: Tensor,
    c: Tensor | None,
    recipe: Recipe,
    recipe_a: Half,
    recipe_b: Half,
    compiled_dims: str,
    alpha: float | None,
) -> None:
    layout_a, layout_b = arguments.granularities(name, recipe, recipe_a, recipe_b)
    (left, scale_a), (right, scale_b) = arguments.pair(name, "a", a), arguments.pair(name, "b", b)
    arguments.same_device(name, c, a=left, b=right, d=d, scales_of_a=scale_a, scales_of_b=scale_b)
    arguments.dimensions(name, 2, a=left, b=right, d=d, scales_of_a=scale_a, scales_of_b=scale_b)
    arguments.operands(name, arguments.E4M3, left, right)
    forms = name.removesuffix("_skip_head_mid")[-2:]
    if forms[0] == "t":
        left, scale_a = left.mT, scale_a.mT
    if forms[1] == "n":
        right, scale_b = right.mT, scale_b.mT
    (m, k), (n, k_b) = left.shape, right.shape
    arguments.same_depth(name, left, right, "(M, K)", "(N, K)", k, k_b)
    arguments.result(name, d, (m, n), "(M, N)")
    arguments.summand(name, c, d)
    arguments.compiled(name, compiled_dims)
    arguments.scales(name, "a", scale_a, layout_a, m, k, ())
    arguments.scales(name, "b", scale_b, layout_b, n, k, ())
    if arguments.is_settled(name, left, right, c, d, k):
        return
    scale_a = arguments.laid_out(name, "a", scale_a, layout_a, m, k)
    scale_b = arguments.laid_out(name, "b", scale_b, layout_b, n, k)
    scale = 1.0 if alpha is None else alpha
    scaled_matmul(left, right, scale_a, scale_b, c=c, alpha=scale, trans_b=True, out_dtype=d.dtype, out=d)
