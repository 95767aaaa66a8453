"""The raw op of groups along K, which are given by their ends."""

import torch
from torch import Tensor

from tilewright.dispatch import RawOp
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.errors import InputError
from tilewright.ops.gemm.dense.checks import FP8, RESULTS, check_epilogue, check_operands, check_out_dtype
from tilewright.ops.gemm.grouped.args import refuses_out, scaling_code
from tilewright.ops.gemm.grouped.checks import check_gradient, check_scales, check_sizes, check_strides
from tilewright.ops.gemm.grouped.reference import product_along_k
from tilewright.ops.gemm.operands import aligned, copyable, layout_code

SCHEMA = "Tensor a, Tensor b, Tensor? scale_a, Tensor? scale_b, Tensor? c, Tensor ends, ScalarType out_dtype"
BUCKET = ("T", "M", "N", "G", "layout", "aligned", "out_bits", "scaling")


def bucket(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    c: Tensor | None,
    ends: Tensor,
    out_dtype: torch.dtype,
) -> tuple[int, ...]:
    """Returns what a choice of kernel may depend on, named by `BUCKET`: T in powers of two, exact M, N and G."""
    return (
        row_bucket(a.shape[1]),
        hint(a.shape[0]),
        hint(b.shape[1]),
        hint(ends.shape[0]),
        layout_code(a, b),
        int(aligned(a, b, b.shape[1], out_dtype)),
        8 * out_dtype.itemsize,
        scaling_code(a, b, scale_a, scale_b),
    )


def whole_blocks(scale_a: Tensor | None, a: Tensor) -> str | None:
    """Why a (M, T) with scales cannot run, or None: kernels read all 128 elements of a scale, also at the end of T."""
    if scale_a is None or a.shape[1] % 128 == 0:
        return None
    return f"needs T in multiples of 128 where 128 along it share a scale, got {a.shape[1]}"


def check(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    c: Tensor | None,
    ends: Tensor,
    out_dtype: torch.dtype,
) -> None:
    """Raises InputError for what the docstring of `k_grouped_matmul` excludes."""
    op = "k_grouped_matmul"
    check_operands(op, a, b)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise InputError(
            f"{op}: op(a) is {tuple(a.shape)} and op(b) is {tuple(b.shape)}; needs (M, T) and (T, N) of one T. "
            "trans_a=True and trans_b=True swap the dimensions."
        )
    check_strides(op, a, b)
    check_out_dtype(op, a.dtype, out_dtype)
    check_sizes(op, "ends", ends, a, ends.shape[0] if isinstance(ends, Tensor) and ends.dim() == 1 else 0)
    check_epilogue(op, (ends.shape[0], a.shape[0], b.shape[1]), a, None, c, "")
    check_scales(op, a, b, scale_a, scale_b)
    check_gradient(op, a, b, "")


FORWARD = RawOp(
    "k_grouped_matmul",
    "fwd",
    SCHEMA,
    package=__name__.rpartition(".")[0],
    outputs=lambda a, b, scale_a, scale_b, c, ends, out_dtype: (((ends.shape[0], a.shape[0], b.shape[1]), out_dtype),),
    reference=product_along_k,
    bucket=bucket,
    bucket_names=BUCKET,
    dtypes=(*RESULTS, FP8),
    out=True,
    reference_writes=True,
    refuses_out=refuses_out,
    direct=lambda out, *args: copyable(out) or not bucket(*args)[5],
)
