"""Consecutive groups of rows, each times its own matrix.  The contract."""

import torch
from torch import Tensor

from tilewright.dispatch import Contract, call, dispatch, register
from tilewright.ops.gemm.activation import activated
from tilewright.ops.gemm.grouped import samples
from tilewright.ops.gemm.grouped.args import forward_op
from tilewright.ops.gemm.grouped.calls import matrices, rows_arguments
from tilewright.ops.gemm.grouped.checks import check_rows
from tilewright.ops.gemm.grouped.gradient import gradient_of
from tilewright.ops.gemm.grouped.reference import rows_product
from tilewright.ops.gemm.grouped_matmul.workloads import CPU_WORKLOADS, EDGE_CASES, WORKLOADS

_FORM = "(T, K) and (G, K, N)"


@dispatch("grouped_matmul")
def grouped_matmul(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    *,
    starts: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    activation: str | None = None,
    trans_b: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """D[starts[g]:ends[g]] = act(A[starts[g]:ends[g]] @ op(B[g])) for every group g, in one launch.

    a: (T, K)   b: (G, K, N), or (G, N, K) with trans_b   bf16|fp16|fp32|float8_e4m3fn, the same for both.
    ends: (G,) int32 on a.device: the row after the last of each group.   starts: (G,) int32, by default the end of the
    group before.  Groups may begin at any row, be empty, or have all rows; they must not overlap.  They stay on the
    device: a call never waits for their values, so it can be captured, and replayed with others.
    Returns (T, N_out).  Rows outside of every group are not written: in a result that is allocated here they hold
    anything, in `out` what it held.

    scale_a: (T, 1), (1, 1) or (T, K/128); scale_b: lies as b does, say (G, K/128, N/128); of float8, as the casts of
    tilewright.ops write them.   activation, N_out, out_dtype: as in `matmul`.
    backend: run on exactly this backend ("cuda", "triton", "torch") or raise BackendError.

    Gradients of a and b in bf16, fp16, fp32; that of a is 0 outside of the groups.  That of b needs groups without gaps
    (no `starts`).  Raises InputError for shapes that do not fit, mixed dtypes, and every option outside of the above.
    The torch backend waits for the sizes on a CPU, and on a GPU multiplies up to G times as much where torch's own
    grouped kernel does not do.
    """
    matrices("grouped_matmul", a, b, 2, _FORM)
    expected = -(-a.shape[0] // max(b.shape[0], 1))
    scales = scale_a[None] if isinstance(scale_a, Tensor) else scale_a
    args = rows_arguments(
        "grouped_matmul", a[None], b, scales, scale_b, starts, ends, expected, activation, trans_b, out_dtype
    )
    if out is not None:
        call(CONTRACT, args, backend, out[None] if isinstance(out, Tensor) else out)
        return out
    if args[7] != "" and torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        with torch.no_grad():
            CONTRACT.check(*args)  # the activation is no part of the call below
        result = activated(call(CONTRACT, (*args[:7], "", args[8]), backend), None, args[7])
    else:
        result = call(CONTRACT, args, backend)
    return result.squeeze(0)


def reference(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    *,
    starts: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    activation: str | None = None,
    trans_b: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same in plain torch; on float64 the result is float64, whatever `out_dtype` says."""
    scales = None if scale_a is None else scale_a[None]
    args = rows_arguments(
        "grouped_matmul", a[None], b, scales, scale_b, starts, ends, 1, activation, trans_b, out_dtype
    )
    return rows_product(*args).squeeze(0)


FORWARD = forward_op("grouped_matmul", __name__, rows_product)


def check(*args: object) -> None:
    """Raises InputError for what the docstring of `grouped_matmul` excludes."""
    check_rows("grouped_matmul", *args)  # type: ignore[arg-type]


CONTRACT = register(
    Contract(
        name="grouped_matmul",
        family="grouped",
        summary="groups of rows times a matrix of each group",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=samples.grouped,
        cost=samples.rows_cost,
        gradient=gradient_of(FORWARD),
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=EDGE_CASES,
        bad_inputs=samples.bad_rows(masked=False),
        batch_dim=None,
    )
)
