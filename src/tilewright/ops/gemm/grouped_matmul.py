"""Consecutive groups of rows, each times its own matrix."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import Contract, Gradient, RawOp, Workload, call, dispatch, register
from tilewright.dispatch.arguments import Size
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.ops.gemm.activation import activated
from tilewright.ops.gemm.grouped import samples
from tilewright.ops.gemm.grouped.args import GroupedArgs, plain_grouped_args, plain_k_grouped_args
from tilewright.ops.gemm.grouped.calls import matrices, rows_arguments
from tilewright.ops.gemm.grouped.checks import check_rows
from tilewright.ops.gemm.grouped.raw import forward_op
from tilewright.ops.gemm.grouped.reference import product_along_k, rows_product
from tilewright.ops.gemm.grouped.samples import EXPERTS
from tilewright.ops.gemm.k_grouped_matmul import FORWARD as ALONG_K
from tilewright.ops.gemm.operands import FP8, Major, major_b, unit_stride
from tilewright.ops.gemm.scaled.scaling import Scaling

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
    if args.activation and torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        with torch.no_grad():
            CONTRACT.check(*args)  # the activation is no part of the call below
        result = activated(call(CONTRACT, args._replace(activation=""), backend), None, args.activation)
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
    return rows_product(args).squeeze(0)


FORWARD = forward_op("grouped_matmul")


def check(args: GroupedArgs) -> None:
    """Raises InputError for what the docstring of `grouped_matmul` excludes."""
    check_rows("grouped_matmul", args)


# The gradient, by grouped products: dA[group] = dZ[group] @ B[g]^T, dB[g] = A[group]^T @ dZ[group], each accumulated in
# float32, rounded once, and sent to the backend that is best for its sizes and layout.


class GroupedBackwardArgs(NamedTuple):
    dz: Tensor  # (1, R, N)
    a: Tensor | None  # (1, R, K), saved if b needs a gradient
    b: Tensor  # (G, K, N)
    starts: Tensor | None  # (G,) int32
    ends: Tensor  # (G,) int32
    expected_rows: Size
    need_da: bool
    need_db: bool


class GroupedBackwardBucket(NamedTuple):
    rows: int
    N: int
    K: int
    G: int


def _backward_bucket(args: GroupedBackwardArgs) -> GroupedBackwardBucket:
    groups, k, n = args.b.shape
    return GroupedBackwardBucket(row_bucket(args.expected_rows), hint(n), hint(k), hint(groups))


def _compose(run: Callable[..., None], outs: Sequence[Tensor], args: GroupedBackwardArgs) -> None:
    if args.need_da:
        da = outs[0]
        da.zero_()  # rows outside of the groups, which the host does not know
        b = args.b.mT
        run(FORWARD, da, *plain_grouped_args(args.dz, b, args.starts, args.ends, args.expected_rows, da.dtype))
    if args.need_db:
        assert args.a is not None, "saved if b needs a gradient"
        db, left, right = outs[1], args.a[0].mT, args.dz[0]
        if db.stride(-1) != 1:  # b was transposed: write the transpose of its gradient
            db, left, right = db.mT, right.mT, left.mT
        run(ALONG_K, db, *plain_k_grouped_args(left, right, args.ends, db.dtype))


def _gradients(args: GroupedBackwardArgs) -> tuple[tuple[Sequence[int], torch.dtype, Sequence[int]], ...]:
    """Returns shapes, dtypes and strides: dA row-major, dB with the strides of b, so that `.grad` needs no copy."""
    b = args.b
    groups, k, n = b.shape
    rows = args.dz.shape[1]
    transposed = major_b(b) is Major.K
    empty = ((0,), b.dtype, (1,))
    return (
        ((1, rows, k), b.dtype, (rows * k, k, 1)) if args.need_da else empty,
        ((groups, k, n), b.dtype, (k * n, 1, k) if transposed else (k * n, n, 1)) if args.need_db else empty,
    )


def _backward_reference(args: GroupedBackwardArgs) -> tuple[Tensor, Tensor]:
    dz, a, b, starts, ends, expected_rows, need_da, need_db = args
    da, db = b.new_empty(0), b.new_empty(0)
    if need_da:
        rows = torch.zeros(1, dz.shape[1], b.shape[1], dtype=b.dtype, device=b.device)
        da = rows_product(plain_grouped_args(dz, b.mT, starts, ends, expected_rows, b.dtype), rows)
    if need_db:
        assert a is not None, "saved if b needs a gradient"
        db = product_along_k(plain_k_grouped_args(a[0].mT, dz[0], ends, b.dtype))
    return da, db


BACKWARD = RawOp(
    "grouped_matmul",
    "bwd",
    GroupedBackwardArgs,
    package="tilewright.ops.gemm",
    outputs=_gradients,
    reference=_backward_reference,
    bucket=_backward_bucket,
    bucket_names=GroupedBackwardBucket._fields,
    count=2,
    compose=_compose,
)


def _save(args: GroupedArgs, outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Saves b, the limits of the groups, and a if b needs a gradient."""
    direct_call = not (args.a.requires_grad or args.b.requires_grad)  # raw op called directly, outside autograd
    return (args.a if args.b.requires_grad or direct_call else None), args.b, args.starts, args.ends


def _raw_args(grads: tuple[Any, ...], saved: tuple[Any, ...], args: GroupedArgs, needs: Any) -> GroupedBackwardArgs:
    a, b, starts, ends = saved
    # The products run in the operands' dtype, as torch's do: a float32 gradient of bf16 operands is rounded here
    dz = unit_stride(grads[0].to(b.dtype))
    return GroupedBackwardArgs(dz, a, b, starts, ends, args.expected_rows, needs.a, needs.b)


SPLITS = ((4, 8192), (8, 4096))
"""Groups, and the rows that each has."""


def _row(g: int, m: int, n: int, k: int, dtype: torch.dtype, **options: Any) -> Workload:
    name = f"{'fp8' if dtype.itemsize == 1 else 'bf16'}_{g}x{m}_{n}x{k}"
    return Workload(name, {"G": g, "M": m, "N": n, "K": k, **options}, (dtype,), ("fwd",))


WORKLOADS = (
    *(_row(g, m, n, k, torch.bfloat16) for g, m in SPLITS for n, k in EXPERTS),
    *(_row(g, m, n, k, torch.float8_e4m3fn, scaling=int(Scaling.TOKEN_BLOCK)) for g, m in SPLITS for n, k in EXPERTS),
    Workload(
        "bf16_ragged_64x512_4096x2048",
        {"G": 64, "M": 512, "N": 4096, "K": 2048, "split": "random"},
        (torch.bfloat16,),
    ),
)
CPU_WORKLOADS = (Workload("small", {"G": 4, "M": 16, "N": 128, "K": 256, "split": "random"}),)


def _case(name: str, g: int, m: int, n: int, k: int, **options: Any) -> Workload:
    return Workload(name, {"G": g, "M": m, "N": n, "K": k, **options})


EDGE_CASES = (
    _case("even: groups of a tile and a bit", 2, 70, 72, 40),
    _case("ragged: groups begin at any row", 5, 24, 72, 56, split="random"),
    _case("one: a single group has all rows", 4, 20, 72, 40, split="one"),
    _case("sparse: every other group is empty", 6, 15, 40, 64, split="sparse"),
    _case("below_a_tile: groups of one row", 7, 1, 64, 96),
    _case("single: one group is a plain product", 1, 37, 72, 40),
    _case("many: more groups than are read at once", 70, 1, 40, 32, split="random"),
    _case("odd_sizes: no row is aligned", 3, 7, 33, 45, split="random"),
    _case("nn: b is row-major", 3, 20, 72, 56, layout="nn", split="random"),
    _case("long_k: many steps of the accumulator", 3, 4, 48, 1032, split="random"),
    _case("swiglu: pairs of columns become one", 3, 20, 144, 64, activation="swiglu", split="random"),
    _case("gelu: an epilogue", 3, 12, 40, 32, activation="gelu", split="random"),
    _case("float32: the result is wider than the operands", 3, 20, 72, 64, out_dtype=torch.float32, split="random"),
    _case("empty: no rows", 3, 0, 64, 32),
)

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
        gradient=Gradient(
            BACKWARD,
            inputs=("a", "b"),
            save=_save,
            raw_args=_raw_args,
            covers=lambda args: args.activation == "" and args.a.dtype != FP8,
        ),
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=EDGE_CASES,
        bad_inputs=samples.bad_rows(masked=False),
        batch_dim=None,
    )
)
