"""The raw ops of `scaled_matmul` and `scaled_matmul_fp8`: operands (M, K) and (K, N), one bucket for both."""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import RawOp
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.ops.gemm.dense.args import GATED, PLAIN, SEPARATE, refuses_out
from tilewright.ops.gemm.dense.checks import FP8
from tilewright.ops.gemm.operands import aligned, columns_out, copyable, layout_code
from tilewright.ops.gemm.scaled.reference import product, requantised
from tilewright.ops.gemm.scaled.scaling import scaling_of
from tilewright.ops.quant.formats import pair
from tilewright.ops.quant.layout import TOKEN

_OPERANDS = "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias"
BUCKET = ("M", "N", "K", "layout", "aligned", "out_bits", "epilogue", "scaling")


def bucket(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    alpha: float,
    activation: str,
    out_dtype: torch.dtype,
) -> tuple[int, ...]:
    """Returns what a choice of kernel may depend on, named by `BUCKET`: that of `matmul`, and the scaling."""
    n = b.shape[1]
    plain = not activation and bias is None and c is None and alpha == 1.0
    return (
        row_bucket(a.shape[0]),
        hint(n),
        hint(a.shape[1]),
        layout_code(a, b),
        int(aligned(a, b, columns_out(n, activation), out_dtype)),
        8 * out_dtype.itemsize,
        PLAIN if plain else GATED if activation == "swiglu" else SEPARATE,
        int(scaling_of(a, b, scale_a, scale_b)),
    )


def forward_op(package: str) -> RawOp:
    """`_scaled_matmul_fwd`: D (M, N_out) in `out_dtype`."""

    def outputs(a: Tensor, b: Tensor, *rest: Any) -> tuple[tuple[tuple[int, ...], torch.dtype]]:
        activation, out_dtype = rest[-2:]
        return (((a.shape[0], columns_out(b.shape[1], activation)), out_dtype),)

    return RawOp(
        "scaled_matmul",
        "fwd",
        f"{_OPERANDS}, Tensor? c, float alpha, str activation, ScalarType out_dtype",
        package=package,
        outputs=outputs,
        reference=product,
        bucket=bucket,
        bucket_names=BUCKET,
        dtypes=(FP8,),
        out=True,
        refuses_out=refuses_out,
        direct=lambda out, *args: copyable(out) or not bucket(*args)[4],
    )


def quantising_op(package: str) -> RawOp:
    """`_scaled_matmul_fp8_fwd`: D (M, N_out) in e4m3 and its 1x128 scales."""

    def outputs(a: Tensor, b: Tensor, *rest: Any) -> tuple[Any, ...]:
        return pair((a.shape[0], columns_out(b.shape[1], rest[-1])), TOKEN)

    return RawOp(
        "scaled_matmul_fp8",
        "fwd",
        f"{_OPERANDS}, float alpha, str activation",
        package=package,
        outputs=outputs,
        reference=requantised,
        bucket=lambda a, b, scale_a, scale_b, bias, alpha, activation: bucket(
            a, b, scale_a, scale_b, bias, None, alpha, activation, FP8
        ),
        bucket_names=BUCKET,
        dtypes=(FP8,),
        count=2,
    )
