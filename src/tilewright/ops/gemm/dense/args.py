"""Arguments and buckets of `matmul` and `bmm`, which differ only in the leading dimension."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.ops.gemm.operands import FP8, aligned, columns_out, layout_code, unit_stride


class MatmulArgs(NamedTuple):
    a: Tensor  # ([B,] M, K), one of its last two strides is 1
    b: Tensor  # ([B,] K, N), one of its last two strides is 1
    bias: Tensor | None  # (N,)
    c: Tensor | None  # ([B,] M, N_out)
    scale: Tensor | None  # one float32
    alpha: float
    activation: str  # "" is none
    out_dtype: torch.dtype


class MatmulBackwardArgs(NamedTuple):
    dz: Tensor  # ([B,] M, N)
    a: Tensor | None  # ([B,] M, K), saved if b needs a gradient
    b: Tensor  # ([B,] K, N)
    scale: Tensor | None  # one float32
    alpha: float
    need_da: bool
    need_db: bool


class MatmulBucket(NamedTuple):
    """M in powers of two, exact N and K."""

    M: int
    N: int
    K: int
    layout: int
    aligned: int
    out_bits: int
    epilogue: int


class BmmBucket(NamedTuple):
    """`MatmulBucket` and the batch, in powers of two."""

    B: int
    M: int
    N: int
    K: int
    layout: int
    aligned: int
    out_bits: int
    epilogue: int


class MatmulBackwardBucket(NamedTuple):
    M: int
    N: int
    K: int


PLAIN, GATED, SEPARATE = range(3)
"""Epilogues in a bucket: what cuBLAS fuses into the product; "swiglu"; what torch computes in separate passes."""


def matmul_bucket(args: MatmulArgs) -> MatmulBucket:
    """Returns what a choice of kernel may depend on."""
    n = args.b.shape[-1]
    return MatmulBucket(
        M=row_bucket(args.a.shape[-2]),
        N=hint(n),
        K=hint(args.a.shape[-1]),
        layout=layout_code(args.a, args.b),
        aligned=int(aligned(args.a, args.b, columns_out(n, args.activation), args.out_dtype)),
        out_bits=8 * args.out_dtype.itemsize,
        epilogue=_epilogue(args),
    )


def bmm_bucket(args: MatmulArgs) -> BmmBucket:
    """Returns what a choice of kernel may depend on."""
    return BmmBucket(row_bucket(args.a.shape[0]), *matmul_bucket(args))


def _epilogue(args: MatmulArgs) -> int:
    if args.activation:
        return GATED if args.activation == "swiglu" else SEPARATE
    a, bias, c, out_dtype = args.a, args.bias, args.c, args.out_dtype
    addends = [t for t in (bias, c) if t is not None]
    fused = args.scale is None and len(addends) < 2 and all(t.dtype == a.dtype == out_dtype for t in addends)
    fused = fused and (out_dtype == torch.float32 or added_inside(a, bias, c))
    return PLAIN if fused else SEPARATE


def added_inside(a: Tensor, bias: Tensor | None, c: Tensor | None) -> bool:
    """Returns whether cuBLAS adds bias or c to a 16-bit result before the one rounding.  Only for the bias of a
    single matrix: cuBLAS rounds the product before it adds c, or the bias of a batch, which torch copies into the
    result.
    """
    return c is None and (bias is None or a.dim() == 2)


def matmul_args(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    activation: str | None,
    c: Tensor | None,
    alpha: float | Tensor,
    out_dtype: torch.dtype | None,
) -> MatmulArgs:
    """Converts arguments of the public function; a and b are transposed already.  Copies strided a, b and c."""
    scale, factor = (alpha, 1.0) if isinstance(alpha, Tensor) else (None, alpha)
    if isinstance(factor, int):
        factor = float(factor)
    if out_dtype is None:
        out_dtype = torch.bfloat16 if a.dtype == FP8 else a.dtype
    if isinstance(c, Tensor) and c.dim() > 1 and c.stride(-1) != 1:
        c = c.contiguous()
    if isinstance(bias, Tensor):
        bias = bias.contiguous()
    return MatmulArgs(unit_stride(a), unit_stride(b), bias, c, scale, factor, activation or "", out_dtype)


def plain_args(a: Tensor, b: Tensor, out_dtype: torch.dtype, activation: str = "") -> MatmulArgs:
    """Returns the arguments of act(a @ b)."""
    return MatmulArgs(a, b, None, None, None, 1.0, activation, out_dtype)


def as_batch(args: MatmulArgs) -> MatmulArgs:
    """Returns the arguments of `matmul` as those of `bmm`, a batch of one."""
    c = None if args.c is None else args.c.unsqueeze(0)
    return args._replace(a=args.a.unsqueeze(0), b=args.b.unsqueeze(0), c=c)
