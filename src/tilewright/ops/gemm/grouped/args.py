"""Arguments and buckets of grouped products: groups of rows (`grouped_matmul`, `masked_matmul`) and groups along K."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch.arguments import Size
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.ops.gemm.operands import aligned, columns_out, layout_code
from tilewright.ops.gemm.scaled.scaling import scaling_of


class GroupedArgs(NamedTuple):
    a: Tensor  # (1, R, K) of `grouped_matmul`, (G, R, K) of `masked_matmul`
    b: Tensor  # (G, K, N)
    scale_a: Tensor | None  # (1 or G, R blocks, K blocks)
    scale_b: Tensor | None  # (G, N blocks, K blocks)
    starts: Tensor | None  # (G,) int32
    ends: Tensor  # (G,) int32
    expected_rows: Size
    activation: str  # "" is none
    out_dtype: torch.dtype


class GroupedBucket(NamedTuple):
    """The expected rows of a group in powers of two, the exact sizes of one product."""

    rows: int
    N: int
    K: int
    G: int
    layout: int
    aligned: int
    out_bits: int
    gated: int
    scaling: int


class KGroupedArgs(NamedTuple):
    a: Tensor  # (M, T)
    b: Tensor  # (T, N)
    scale_a: Tensor | None  # (M blocks, T blocks)
    scale_b: Tensor | None  # (N blocks, T blocks)
    c: Tensor | None  # (G, M, N)
    ends: Tensor  # (G,) int32
    out_dtype: torch.dtype


class KGroupedBucket(NamedTuple):
    """T in powers of two, exact M, N and G."""

    T: int
    M: int
    N: int
    G: int
    layout: int
    aligned: int
    out_bits: int
    scaling: int


UNSCALED = -1
"""`scaling` of operands without scales."""


def grouped_bucket(args: GroupedArgs) -> GroupedBucket:
    """Returns what a choice of kernel may depend on."""
    a, b = args.a, args.b
    n = b.shape[-1]
    return GroupedBucket(
        rows=row_bucket(args.expected_rows),
        N=hint(n),
        K=hint(b.shape[-2]),
        G=hint(b.shape[0]),
        layout=layout_code(a, b),
        aligned=int(aligned(a, b, columns_out(n, args.activation), args.out_dtype)),
        out_bits=8 * args.out_dtype.itemsize,
        gated=int(args.activation == "swiglu"),
        scaling=scaling_code(a, b, args.scale_a, args.scale_b),
    )


def k_grouped_bucket(args: KGroupedArgs) -> KGroupedBucket:
    """Returns what a choice of kernel may depend on."""
    a, b = args.a, args.b
    return KGroupedBucket(
        T=row_bucket(a.shape[1]),
        M=hint(a.shape[0]),
        N=hint(b.shape[1]),
        G=hint(args.ends.shape[0]),
        layout=layout_code(a, b),
        aligned=int(aligned(a, b, b.shape[1], args.out_dtype)),
        out_bits=8 * args.out_dtype.itemsize,
        scaling=scaling_code(a, b, args.scale_a, args.scale_b),
    )


def scaling_code(a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None) -> int:
    """Returns the `Scaling` of operands (..., R, K) and (..., K, N) as a number, UNSCALED without scales."""
    if scale_a is None or scale_b is None:
        return UNSCALED
    return int(scaling_of(a, b, scale_a, scale_b))


def plain_grouped_args(
    a: Tensor, b: Tensor, starts: Tensor | None, ends: Tensor, expected_rows: int, out_dtype: torch.dtype
) -> GroupedArgs:
    """Returns the arguments of products without scales and activation."""
    return GroupedArgs(a, b, None, None, starts, ends, expected_rows, "", out_dtype)


def plain_k_grouped_args(a: Tensor, b: Tensor, ends: Tensor, out_dtype: torch.dtype) -> KGroupedArgs:
    """Returns the arguments of products without scales and an addend."""
    return KGroupedArgs(a, b, None, None, None, ends, out_dtype)


def whole_blocks(args: KGroupedArgs) -> str | None:
    """Why a (M, T) with scales cannot run, or None: kernels read all 128 elements of a scale, also at the end of T."""
    if args.scale_a is None or args.a.shape[1] % 128 == 0:
        return None
    return f"needs T in multiples of 128 where 128 along it share a scale, got {args.a.shape[1]}"
