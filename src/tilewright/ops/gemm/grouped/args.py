"""The raw ops of `grouped_matmul` and `masked_matmul`: one schema and one bucket, one batch of rows or one a group."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import RawOp
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.ops.gemm.dense.checks import FP8, RESULTS
from tilewright.ops.gemm.operands import aligned, columns_out, layout_code
from tilewright.ops.gemm.scaled.scaling import scaling_of

SCHEMA = (
    "Tensor a, Tensor b, Tensor? scale_a, Tensor? scale_b, Tensor? starts, Tensor ends, "
    "SymInt expected_rows, str activation, ScalarType out_dtype"
)
BUCKET = ("rows", "N", "K", "G", "layout", "aligned", "out_bits", "gated", "scaling")
UNSCALED = -1
"""`scaling` of operands without scales."""


def bucket(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    starts: Tensor | None,
    ends: Tensor,
    expected: int,
    activation: str,
    out_dtype: torch.dtype,
) -> tuple[int, ...]:
    """Returns what a choice of kernel may depend on, named by `BUCKET`: the expected rows of a group in powers of two,
    the exact sizes of one product.
    """
    n = b.shape[-1]
    return (
        row_bucket(expected),
        hint(n),
        hint(b.shape[-2]),
        hint(b.shape[0]),
        layout_code(a, b),
        int(aligned(a, b, columns_out(n, activation), out_dtype)),
        8 * out_dtype.itemsize,
        int(activation == "swiglu"),
        scaling_code(a, b, scale_a, scale_b),
    )


def scaling_code(a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None) -> int:
    """Returns the `Scaling` of operands (..., R, K) and (..., K, N) as a number, UNSCALED without scales."""
    if scale_a is None or scale_b is None:
        return UNSCALED
    return int(scaling_of(a, b, scale_a, scale_b))


def refuses_out(out: Tensor, *args: Any) -> str | None:
    """Returns what `out` lacks to be written, or None: contiguous rows that do not overlap."""
    if out.stride(-1) != 1:
        return "contiguous rows"
    end = 1
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1 and stride < end:
            return "rows that do not overlap"
        end = max(end, (size - 1) * stride + end)
    return None


def forward_op(op: str, package: str, reference: Callable[..., Tensor]) -> RawOp:
    """`_<op>_fwd`: a (Ba, R, K), b (G, K, N) of any strides with a unit one among their last two."""

    def outputs(a: Tensor, b: Tensor, *rest: Any) -> tuple[tuple[Sequence[int], torch.dtype]]:
        activation, out_dtype = rest[-2:]
        return (((a.shape[0], a.shape[1], columns_out(b.shape[-1], activation)), out_dtype),)

    return RawOp(
        op,
        "fwd",
        SCHEMA,
        package=package,
        outputs=outputs,
        reference=reference,
        bucket=bucket,
        bucket_names=BUCKET,
        dtypes=(*RESULTS, FP8),
        out=True,
        reference_writes=True,
        refuses_out=refuses_out,
    )
