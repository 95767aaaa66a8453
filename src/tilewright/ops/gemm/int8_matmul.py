"""Product of int8 matrices with a scale for each row of both."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import Contract, RawOp, call, dispatch, register
from tilewright.dispatch.arguments import refuse_layout
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.errors import InputError
from tilewright.ops.gemm import int8_samples as samples
from tilewright.ops.gemm.dense.checks import check_epilogue, check_out_dtype
from tilewright.ops.gemm.dense.raw import refuses_out
from tilewright.ops.gemm.operands import (
    ACTIVATIONS,
    Major,
    aligned,
    apply_epilogue,
    columns_out,
    copyable,
    fold,
    folded_out,
    major_a,
)
from tilewright.ops.gemm.scaled.cublas import padded

OP = "int8_matmul"
MOST_K = 2**17 - 1
"""The longest sum of products that int32 holds: each is 2^14 at most."""


class Int8MatmulArgs(NamedTuple):
    a: Tensor  # (M, K) int8, contiguous along K
    b: Tensor  # (N, K) int8, contiguous along K
    scale_a: Tensor  # (M, 1)
    scale_b: Tensor  # (N, 1)
    bias: Tensor | None  # (N,)
    activation: str  # "" is none
    out_dtype: torch.dtype


class Int8MatmulBucket(NamedTuple):
    M: int  # rounded up to a power of two
    N: int
    K: int
    aligned: int  # TMA can read a and b in place, and write a contiguous result
    out_bits: int
    gated: int  # the activation halves the columns


@dispatch(OP)
def int8_matmul(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """D = act((A @ B.T) * scale_a * scale_b.T + bias) of int8 matrices (W8A8), with exact sums and one rounding.

    a: (..., M, K) int8, scale_a: (..., M, 1) float32, one a token.   b: (N, K) int8, scale_b: (N, 1) float32, one an
    output channel.  Both pairs are as `per_token_cast_to_int8` makes them; one scale for all is `scale.expand(M, 1)`.
    K is at most 131,071, so that sums of any int8 numbers, -128 among them, fit int32.   Returns (..., M, N_out).

    Sums are int32.  The rest is float32, in the order of the formula, and rounded once to out_dtype: without an
    activation every configuration gives the same bits, which are torch's too.  A scale that is NaN makes its row NaN.
    Operands that are not contiguous along K cost a copy.

    bias: (N,) bf16|fp16|fp32.   activation: None, "relu", "gelu" (by tanh), "silu", or "swiglu", for which rows of b
    are pairs (gate_0, up_0, gate_1, up_1, ...) and N_out = N / 2.   out_dtype: bf16|fp16|fp32, by default bf16.
    out: tensor with contiguous rows to write instead of allocating.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.  On a GPU torch runs `_int_mm`.
    There is no gradient: raises InputError where one is wanted, and for all that is outside of the above.
    """
    refuse_layout(OP, a=a, scale_a=scale_a, bias=bias)
    if not isinstance(a, Tensor) or a.dim() < 2:
        raise InputError(f"{OP}: a is {_described(a)}; needs a tensor (..., M, K).")
    leading = a.shape[:-1]
    a_rows, scale_rows = fold(OP, "a", a, leading), fold(OP, "scale_a", scale_a, leading)
    bias = bias.contiguous() if isinstance(bias, Tensor) else bias
    args = Int8MatmulArgs(
        _k_major(a_rows), _k_major(b), scale_rows, scale_b, bias, activation or "", out_dtype or torch.bfloat16
    )
    if out is not None:
        if a.dim() > 2:  # what is wrong with the operands comes before what is wrong with folding `out`
            with torch.no_grad():
                CONTRACT.check(*args)
        call(CONTRACT, args, backend, folded_out(OP, out, leading))
        return out
    result: Tensor = call(CONTRACT, args, backend)
    return result if a.dim() == 2 else result.view(*leading, result.shape[-1])


def _k_major(t: Any) -> Any:
    """Returns a matrix that is contiguous along K; the checks refuse what is none."""
    matrix = isinstance(t, Tensor) and t.layout is torch.strided and t.dim() == 2
    return t.clone(memory_format=torch.contiguous_format) if matrix and t.stride(1) != 1 else t


def reference(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same in plain torch; with float64 scales the result is float64, whatever `out_dtype` says."""
    scale_rows = scale_a.flatten(0, -2)
    args = Int8MatmulArgs(a.flatten(0, -2), b, scale_rows, scale_b, bias, activation or "", out_dtype or torch.bfloat16)
    result = product(args)
    return result.reshape(*a.shape[:-1], result.shape[-1])


def product(args: Int8MatmulArgs) -> Tensor:
    """Returns act((a @ b.T) * scale_a * scale_b.T + bias), in the dtype of the scales and rounded once."""
    a, b, scale_a, scale_b, bias, activation, out_dtype = args
    z = sums(a, b).to(scale_a.dtype) * scale_a * scale_b.mT
    return apply_epilogue(z, bias, None, activation, torch.float64 if z.dtype == torch.float64 else out_dtype)


def sums(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b.T, exactly: int32 of tensor cores on a GPU, float64 elsewhere, for which both are copied."""
    if a.device.type != "cuda" or 0 in (*a.shape, b.shape[0]):
        return a.to(torch.float64) @ b.to(torch.float64).mT
    return cublas_sums(a, b)


def cublas_sums(a: Tensor, b: Tensor) -> Tensor:
    """Returns int32 a @ b.T by cuBLASLt.

    `torch._int_mm` takes more than 16 rows, and N and K in multiples of 8; others are padded with zeros.
    """
    m, n = a.shape[0], b.shape[0]
    result = torch._int_mm(padded(a, 32 if m <= 16 else 1, 16), padded(b, 16, 16).mT)
    return result[:m, :n]


def along_k(a: Tensor, b: Tensor) -> bool:
    """Returns whether TMA can read both along K: it takes a single column for a row."""
    return major_a(a) is Major.K and major_a(b) is Major.K


def bucket_of(args: Int8MatmulArgs) -> Int8MatmulBucket:
    """Returns the sizes and properties that a config is chosen by."""
    a, b, n_out = args.a, args.b, columns_out(args.b.shape[0], args.activation)
    return Int8MatmulBucket(
        M=row_bucket(a.shape[0]),
        N=hint(b.shape[0]),
        K=hint(a.shape[1]),
        aligned=int(along_k(a, b) and aligned(a, b, n_out, args.out_dtype)),
        out_bits=8 * args.out_dtype.itemsize,
        gated=int(args.activation == "swiglu"),
    )


FORWARD = RawOp(
    OP,
    "fwd",
    Int8MatmulArgs,
    package="tilewright.ops.gemm",
    kernels=("triton.int8",),
    outputs=lambda args: (((args.a.shape[0], columns_out(args.b.shape[0], args.activation)), args.out_dtype),),
    reference=product,
    bucket=bucket_of,
    bucket_names=Int8MatmulBucket._fields,
    dtypes=(torch.int8,),
    out=True,
    refuses_out=refuses_out,
    direct=lambda out, args: copyable(out) or not bucket_of(args).aligned,
)


def check(args: Int8MatmulArgs) -> None:
    """Raises InputError for what the docstring of `int8_matmul` excludes."""
    a, b, scale_a, scale_b, bias, activation, out_dtype = args
    for name, t in (("a", a), ("b", b)):
        if not isinstance(t, Tensor) or t.dtype != torch.int8 or t.dim() != 2:
            raise InputError(
                f"{OP}: {name} is {_described(t)}; needs an int8 matrix, K last. per_token_cast_to_int8 makes one."
            )
    if a.shape[1] != b.shape[1]:
        raise InputError(f"{OP}: a is {tuple(a.shape)} and b is {tuple(b.shape)}; they must agree in K, the last.")
    if a.shape[1] > MOST_K:
        raise InputError(
            f"{OP}: K is {a.shape[1]}; at most {MOST_K} products of int8 numbers fit an int32 sum. Split K, and add "
            "float32 results."
        )
    if a.device != b.device:
        raise InputError(f"{OP}: a is on {a.device}, b on {b.device}. Move them to one device.")
    for name, scales, operand in (("scale_a", scale_a, a), ("scale_b", scale_b, b)):
        expected = (operand.shape[0], 1)
        if not isinstance(scales, Tensor) or scales.dtype != torch.float32 or tuple(scales.shape) != expected:
            raise InputError(
                f"{OP}: {name} is {_described(scales)}; needs {expected} float32, a scale for each row of its operand."
            )
        if scales.device != a.device:
            raise InputError(f"{OP}: {name} is on {scales.device}, the operands on {a.device}.")
    if activation not in ACTIVATIONS:
        raise InputError(
            f"{OP}: activation is {activation!r}; allowed are None, {', '.join(map(repr, ACTIVATIONS[1:]))}."
        )
    check_out_dtype(OP, torch.int8, out_dtype)
    check_epilogue(OP, (a.shape[0], b.shape[0]), a, bias, None, activation)
    floats = (scale_a, scale_b, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in floats):
        raise InputError(f"{OP}: a gradient is wanted of a product of int8, which has none. Use torch.no_grad().")


def _described(t: Any) -> str:
    return f"{tuple(t.shape)} {t.dtype}" if isinstance(t, Tensor) else f"a {type(t).__name__}"


CONTRACT = register(
    Contract(
        name=OP,
        family="gemm_int8",
        summary="product of int8 matrices scaled by token and output channel, with bias and activation",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=samples.inputs,
        cost=samples.cost,
        workloads=samples.WORKLOADS,
        cpu_workloads=samples.CPU_WORKLOADS,
        edge_cases=samples.EDGE_CASES,
        bad_inputs=samples.BAD_INPUTS,
    )
)
