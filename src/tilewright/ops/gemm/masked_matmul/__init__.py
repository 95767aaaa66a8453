"""A batch of matrices of which the first rows count, each times its own matrix.  The contract."""

import torch
from torch import Tensor

from tilewright.dispatch import Contract, call, dispatch, register
from tilewright.ops.gemm.grouped import samples
from tilewright.ops.gemm.grouped.args import forward_op
from tilewright.ops.gemm.grouped.calls import matrices, rows_arguments
from tilewright.ops.gemm.grouped.checks import check_rows
from tilewright.ops.gemm.grouped.reference import rows_product
from tilewright.ops.gemm.masked_matmul.workloads import CPU_WORKLOADS, EDGE_CASES, WORKLOADS


@dispatch("masked_matmul")
def masked_matmul(
    a: Tensor,
    b: Tensor,
    rows: Tensor,
    *,
    expected_rows: int | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    activation: str | None = None,
    trans_b: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """D[g, :rows[g]] = act(A[g, :rows[g]] @ op(B[g])) for every group g, in one launch.

    a: (G, Mmax, K)   b: (G, K, N), or (G, N, K) with trans_b   bf16|fp16|fp32|float8_e4m3fn, the same for both.
    rows: (G,) int32 on a.device, 0..Mmax: how many rows of each group count.  It stays there: a decoding step can
    be captured once and replayed with other numbers.   expected_rows: how many a group has as a rule; the choice of a
    kernel depends on it, by default on Mmax, the result does not.
    Returns (G, Mmax, N_out).  Rows from rows[g] on are not written: in a result that is allocated here they hold
    anything, in `out` what it held.

    scale_a: (G, Mmax, 1), (G, 1, 1) or (G, Mmax, K/128); everything else as in `grouped_matmul`.  No gradient: rows
    that follow each other, as `grouped_matmul` takes them, waste no memory in training.
    Raises InputError for shapes that do not fit, mixed dtypes, and every option outside of the above.
    """
    matrices("masked_matmul", a, b, 3, "(G, Mmax, K) and (G, K, N)")
    expected = a.shape[1] if expected_rows is None else expected_rows
    args = rows_arguments("masked_matmul", a, b, scale_a, scale_b, None, rows, expected, activation, trans_b, out_dtype)
    result: Tensor = call(CONTRACT, args, backend, out)
    return result


def reference(
    a: Tensor,
    b: Tensor,
    rows: Tensor,
    *,
    expected_rows: int | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    activation: str | None = None,
    trans_b: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same in plain torch, a product of whole batches; rows that do not count are 0."""
    args = rows_arguments("masked_matmul", a, b, scale_a, scale_b, None, rows, 1, activation, trans_b, out_dtype)
    return rows_product(*args)


FORWARD = forward_op("masked_matmul", __name__, rows_product)


def check(*args: object) -> None:
    """Raises InputError for what the docstring of `masked_matmul` excludes."""
    check_rows("masked_matmul", *args)  # type: ignore[arg-type]


CONTRACT = register(
    Contract(
        name="masked_matmul",
        family="grouped",
        summary="a batch of products in which the first rows of each matrix count",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=samples.masked,
        cost=samples.rows_cost,
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=EDGE_CASES,
        bad_inputs=samples.bad_rows(masked=True),
        batch_dim=None,
    )
)
