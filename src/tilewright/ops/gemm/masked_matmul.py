"""A batch of matrices of which the first rows count, each times its own matrix."""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Contract, Workload, call, dispatch, register
from tilewright.ops.gemm.grouped import samples
from tilewright.ops.gemm.grouped.args import GroupedArgs
from tilewright.ops.gemm.grouped.calls import matrices, rows_arguments
from tilewright.ops.gemm.grouped.checks import check_rows
from tilewright.ops.gemm.grouped.raw import forward_op
from tilewright.ops.gemm.grouped.reference import rows_product
from tilewright.ops.gemm.grouped.samples import EXPERTS
from tilewright.ops.gemm.scaled.scaling import Scaling


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
    return rows_product(args)


FORWARD = forward_op("masked_matmul")


def check(args: GroupedArgs) -> None:
    """Raises InputError for what the docstring of `masked_matmul` excludes."""
    check_rows("masked_matmul", args)


SPLITS = ((32, 20), (8, 16), (6, 1024))
"""Groups, and the rows that each has: a decoding step of a mixture of experts, and a chunk of prefill.  Every row
counts, because the bench compares whole results: rows that do not count hold anything.
"""


def _row(g: int, m: int, n: int, k: int, dtype: torch.dtype, **options: Any) -> Workload:
    name = f"{'fp8' if dtype.itemsize == 1 else 'bf16'}_{g}x{m}_{n}x{k}"
    return Workload(name, {"G": g, "M": m, "N": n, "K": k, **options}, (dtype,), ("fwd",))


WORKLOADS = (
    *(_row(g, m, n, k, torch.bfloat16) for g, m in SPLITS for n, k in EXPERTS),
    *(_row(g, m, n, k, torch.float8_e4m3fn, scaling=int(Scaling.TOKEN_BLOCK)) for g, m in SPLITS for n, k in EXPERTS),
)
CPU_WORKLOADS = (Workload("small", {"G": 4, "M": 16, "N": 128, "K": 256}, directions=("fwd",)),)


def _case(name: str, g: int, m: int, n: int, k: int, **options: Any) -> Workload:
    return Workload(name, {"G": g, "M": m, "N": n, "K": k, **options})


EDGE_CASES = (
    _case("ragged: a tile and a bit in M, N and K", 3, 70, 136, 72),
    _case("one_row: most of a tile is padding", 5, 1, 64, 96),
    _case("one: a single group", 1, 37, 72, 40),
    _case("odd_sizes: no row is aligned", 3, 7, 33, 45),
    _case("nn: b is row-major", 2, 20, 72, 56, layout="nn"),
    _case("swiglu: pairs of columns become one", 2, 36, 144, 64, activation="swiglu"),
    _case("silu: an epilogue", 2, 12, 40, 32, activation="silu"),
    _case("float32: the result is wider than the operands", 2, 36, 80, 64, out_dtype=torch.float32),
    _case("empty: no rows", 3, 0, 64, 32),
)

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
