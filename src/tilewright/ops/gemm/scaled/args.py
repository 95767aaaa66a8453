"""Arguments and bucket of `scaled_matmul` and `scaled_matmul_fp8`: operands (M, K) and (K, N)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.ops.gemm.dense.args import GATED, PLAIN, SEPARATE
from tilewright.ops.gemm.operands import aligned, columns_out, layout_code
from tilewright.ops.gemm.scaled.scaling import kernel_layouts, scaling_of


class ScaledMatmulArgs(NamedTuple):
    a: Tensor  # (M, K) e4m3, contiguous along K
    b: Tensor  # (K, N) e4m3, contiguous along K
    scale_a: Tensor  # (M blocks, K blocks)
    scale_b: Tensor  # (N blocks, K blocks)
    bias: Tensor | None  # (N,)
    c: Tensor | None  # (M, N_out)
    alpha: float
    activation: str  # "" is none
    out_dtype: torch.dtype


class ScaledMatmulFp8Args(NamedTuple):
    a: Tensor  # (M, K) e4m3, contiguous along K
    b: Tensor  # (K, N) e4m3, contiguous along K
    scale_a: Tensor  # (M blocks, K blocks)
    scale_b: Tensor  # (N blocks, K blocks)
    bias: Tensor | None  # (N,)
    alpha: float
    activation: str  # "" is none


_HALVES = 64
"""Rows from which on a bucket is half as wide as one of `matmul`."""


class ScaledBucket(NamedTuple):
    """The bucket of `matmul` with finer rows, and the scaling."""

    M: int  # rounded up to a power of two, or to three quarters of one of more than `_HALVES`
    N: int
    K: int
    layout: int
    aligned: int
    out_bits: int
    epilogue: int
    scaling: int


def scaled_bucket(args: ScaledMatmulArgs) -> ScaledBucket:
    """Returns what a choice of kernel may depend on."""
    n, activation = args.b.shape[1], args.activation
    plain = not activation and args.bias is None and args.c is None and args.alpha == 1.0
    return ScaledBucket(
        M=_rows(args.a.shape[0]),
        N=hint(n),
        K=hint(args.a.shape[1]),
        layout=layout_code(args.a, args.b),
        aligned=int(aligned(args.a, args.b, columns_out(n, activation), args.out_dtype)),
        out_bits=8 * args.out_dtype.itemsize,
        epilogue=PLAIN if plain else GATED if activation == "swiglu" else SEPARATE,
        scaling=int(scaling_of(args.a, args.b, args.scale_a, args.scale_b)),
    )


def _rows(m: Any) -> int:
    """The bucket of `m` rows: 1, 2, 4, ..., 64, 96, 128, 192, 256, ...

    With powers of two alone the tile of 256 rows served 192, and that of 512 served 384: 10 % slower than their own
    (H200, twelve layer shapes, 2026-11).
    """
    power = row_bucket(m)
    smaller = power // 4 * 3
    return smaller if power > _HALVES and hint(m) <= smaller else power


def with_result(args: ScaledMatmulFp8Args, out_dtype: torch.dtype) -> ScaledMatmulArgs:
    """Returns the same product as `scaled_matmul` of another result."""
    a, b, scale_a, scale_b, bias, alpha, activation = args
    return ScaledMatmulArgs(a, b, scale_a, scale_b, bias, None, alpha, activation, out_dtype)


def plain_scaled_args(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, activation: str = ""
) -> ScaledMatmulArgs:
    """Returns the arguments of act((a * scale_a) @ (b * scale_b))."""
    return ScaledMatmulArgs(a, b, scale_a, scale_b, None, None, 1.0, activation, out_dtype)


def as_batch(op: str, args: ScaledMatmulArgs) -> ScaledMatmulArgs:
    """Returns a batch of one product, its scales as kernels read them: see `kernel_layouts`."""
    scale_a, scale_b = kernel_layouts(op, args.a, args.b, args.scale_a, args.scale_b)
    return args._replace(
        a=args.a.unsqueeze(0),
        b=args.b.unsqueeze(0),
        scale_a=scale_a.unsqueeze(0),
        scale_b=scale_b.unsqueeze(0),
        c=None if args.c is None else args.c.unsqueeze(0),
    )
