"""DeepGEMM's sums over indices: products of batches in four forms of bf16 and one of float8."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tilewright.compat.deep_gemm import arguments
from tilewright.compat.deep_gemm.arguments import Pair
from tilewright.errors import InputError
from tilewright.ops.gemm.bmm import bmm
from tilewright.ops.gemm.masked_matmul import masked_matmul
from tilewright.ops.gemm.matmul import matmul


def einsum(expr: str, a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, use_cublaslt: bool = False) -> None:
    """d = c + the sum that `expr` names, of bf16 a and b, in float32 and rounded once.

    "bmk,bnk->mn"    a (B, M, K), b (B, N, K), d (M, N): one sum over B and K, of copies of a and b.
    "bhr,hdr->bhd"   a (B, H, R), b (H, D, R), d (B, H, D): a product for each h.
    "bhd,hdr->bhr"   a (B, H, D), b (H, D, R), d (B, H, R): b not transposed.
    "bhd,bhr->hdr"   a (B, H, D), b (B, H, R), d (H, D, R): the gradient of b, a sum over B.
    d: bf16|fp32, its last dimension contiguous; overwritten.   c: like d, may be d itself.
    The two forms with b (H, D, R) equal torch.einsum bit for bit if d is bf16 and c None: they copy its result into d.
    use_cublaslt: run torch's own product in the other forms too.
    Raises InputError for another expression, other shapes and dtypes, and if a gradient would be lost.
    """
    name = f"einsum({expr!r})"
    if expr not in _FORMS:
        raise InputError(f"einsum: expr is {expr!r}; there are {', '.join(map(repr, _FORMS))}.")
    sizes = _sizes(name, expr, a, b)
    arguments.same_device(name, c, a=a, b=b, d=d)
    arguments.operands(name, arguments.BF16, a, b)
    letters = expr.partition("->")[2]
    arguments.result(name, d, [sizes[letter] for letter in letters], f"({', '.join(letters)})")
    arguments.summand(name, c, d)
    summed = [size for letter, size in sizes.items() if letter not in letters]
    if arguments.is_settled(name, a, b, c, d, math.prod(summed)):
        return
    if expr in _TORCH_FORMS and c is None and d.dtype == arguments.BF16:
        arguments.no_gradient(name, a, b)
        d.copy_(torch.einsum(expr, a, b))
        return
    _FORMS[expr](a, b, d, c, "torch" if use_cublaslt else None)


def fp8_einsum(
    expr: str,
    a: Pair,
    b: Pair,
    d: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 128, 128),
) -> None:
    """d = the sum that `expr`, "bhr,hdr->bhd", names, with float8 operands.

    a: (B, H, R) e4m3 and (B, H, ceil(R/128)) float32.   b: (H, D, R) and (H, ceil(D/128), ceil(R/128)).
    d: (B, H, D) bf16|fp32.   c: None, as on Hopper.   recipe: (1, 128, 128), or (1, 1, 128) with scales 1x128 of b.
    """
    name = f"fp8_einsum({expr!r})"
    if expr != "bhr,hdr->bhd":
        raise InputError(f"fp8_einsum: expr is {expr!r}; on Hopper there is 'bhr,hdr->bhd'.")
    if c is not None:
        raise InputError(f"{name}: c is given; this product adds none. Add it to d afterwards.")
    layout_a, layout_b = arguments.granularities(name, recipe, None, None)
    (left, scale_a), (right, scale_b) = arguments.pair(name, "a", a), arguments.pair(name, "b", b)
    arguments.same_device(name, a=left, b=right, d=d, scales_of_a=scale_a, scales_of_b=scale_b)
    sizes = _sizes(name, expr, left, right)
    arguments.operands(name, arguments.E4M3, left, right)
    rows, heads, columns, depth = (sizes[letter] for letter in "bhdr")
    arguments.result(name, d, (rows, heads, columns), "(b, h, d)")
    arguments.dimensions(name, 3, scales_of_a=scale_a, scales_of_b=scale_b)
    arguments.scales(name, "a", scale_a.transpose(0, 1), layout_a, rows, depth, (heads,))
    arguments.scales(name, "b", scale_b, layout_b, columns, depth, (heads,))
    if arguments.is_settled(name, left, right, None, d, depth):
        return
    all_rows = torch.full((heads,), rows, dtype=torch.int32, device=d.device)
    masked_matmul(
        left.transpose(0, 1),
        right,
        all_rows,
        scale_a=arguments.laid_out(name, "a", scale_a.transpose(0, 1), layout_a, rows, depth),
        scale_b=arguments.laid_out(name, "b", scale_b, layout_b, columns, depth),
        trans_b=True,
        out_dtype=d.dtype,
        out=d.transpose(0, 1),
    )


def _sizes(name: str, expr: str, a: Tensor, b: Tensor) -> dict[str, int]:
    """The size of each letter.  Raises InputError if a and b disagree."""
    first, second = expr.partition("->")[0].split(",")
    arguments.same_device(name, a=a, b=b)
    arguments.dimensions(name, 3, a=a, b=b)
    sizes = dict(zip(first, a.shape, strict=True))
    for letter, size in zip(second, b.shape, strict=True):
        if sizes.setdefault(letter, size) != size:
            raise InputError(
                f"{name}: a is {tuple(a.shape)}, b is {tuple(b.shape)}; {letter} is {sizes[letter]} in one and {size} "
                "in the other."
            )
    return sizes


def _summed(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None, backend: str | None) -> None:
    left, right = (t.transpose(0, 1).flatten(1) for t in (a, b))
    matmul(left, right, c=c, trans_b=True, out_dtype=d.dtype, out=d, backend=backend)


def _batched(trans_b: bool) -> Callable[[Tensor, Tensor, Tensor, Tensor | None, str | None], None]:
    def run(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None, backend: str | None) -> None:
        left, out = a.transpose(0, 1), d.transpose(0, 1)
        add = None if c is None else c.transpose(0, 1)
        bmm(left, b, c=add, trans_b=trans_b, out_dtype=d.dtype, out=out, backend=backend)

    return run


def _weight_gradient(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None, backend: str | None) -> None:
    bmm(a.permute(1, 2, 0), b.transpose(0, 1), c=c, out_dtype=d.dtype, out=d, backend=backend)


_FORMS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | None, str | None], None]] = {
    "bmk,bnk->mn": _summed,
    "bhr,hdr->bhd": _batched(trans_b=True),
    "bhd,hdr->bhr": _batched(trans_b=False),
    "bhd,bhr->hdr": _weight_gradient,
}
_TORCH_FORMS = ("bhr,hdr->bhd", "bhd,hdr->bhr")
