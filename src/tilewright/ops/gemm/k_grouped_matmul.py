"""Sums over groups of rows: a matrix for each group, as gradients of experts' weights are."""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Contract, RawOp, Workload, call, dispatch, register
from tilewright.errors import InputError
from tilewright.ops.gemm.dense.checks import check_epilogue, check_operands, check_out_dtype
from tilewright.ops.gemm.dense.raw import refuses_out
from tilewright.ops.gemm.grouped import samples
from tilewright.ops.gemm.grouped.args import KGroupedArgs, KGroupedBucket, k_grouped_bucket
from tilewright.ops.gemm.grouped.calls import contiguous, laid_out, transposed_scales
from tilewright.ops.gemm.grouped.checks import check_gradient, check_scales, check_sizes, check_strides
from tilewright.ops.gemm.grouped.reference import product_along_k
from tilewright.ops.gemm.operands import FP8, RESULTS, copyable, unit_stride
from tilewright.ops.gemm.scaled.scaling import Scaling

OP = "k_grouped_matmul"


@dispatch("k_grouped_matmul")
def k_grouped_matmul(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    *,
    c: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    trans_a: bool = False,
    trans_b: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """D[g] = op(A)[:, group g] @ op(B)[group g] + C[g], accumulated in float32, rounded once, in one launch.

    a: (M, T), or (T, M) with trans_a   b: (T, N), or (N, T) with trans_b   bf16|fp16|fp32|float8_e4m3fn, both the same.
    ends: (G,) int32 on a.device: group g is ends[g - 1] <= t < ends[g], the first begins at 0.  It stays on the device.
    With a = x (T, M) and trans_a, b = dy (T, N), these are the gradients of G experts' weights (M, N).
    c: (G, M, N) bf16|fp16|fp32, what is accumulated into; may be `out` itself.
    Returns (G, M, N) in out_dtype, float32 by default; an empty group is c, or zeros.

    scale_a, scale_b: of float8, as their operand lies; (M, T/128) and (N, T/128), once transposed, are one for 128 of
    t and the kernels' own, and then groups end at multiples of 128.   backend: as in `grouped_matmul`.   No gradient.
    Raises InputError for shapes that do not fit, mixed dtypes, and every option outside of the above.
    """
    for name, t in (("a", a), ("b", b)):
        if not isinstance(t, Tensor) or t.dim() != 2:
            got = tuple(t.shape) if isinstance(t, Tensor) else f"a {type(t).__name__}"
            raise InputError(f"{OP}: {name} is {got}; needs (M, T) and (T, N).")
    args = _arguments(a, b, ends, c, scale_a, scale_b, trans_a, trans_b, out_dtype)
    result: Tensor = call(CONTRACT, args, backend, out)
    return result


def _arguments(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    c: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    trans_a: bool,
    trans_b: bool,
    out_dtype: torch.dtype | None,
) -> KGroupedArgs:
    left, right = (a.mT if trans_a else a), (b.mT if trans_b else b)
    scales = laid_out(OP, left, right, transposed_scales(scale_a, not trans_a), transposed_scales(scale_b, trans_b))
    if isinstance(c, Tensor) and c.dim() == 3 and c.stride(-1) != 1:
        c = c.contiguous()
    return KGroupedArgs(unit_stride(left), unit_stride(right), *scales, c, contiguous(ends), out_dtype or _float(a))


def _float(a: Tensor) -> torch.dtype:
    return torch.float64 if a.dtype == torch.float64 else torch.float32


def reference(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    *,
    c: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    trans_a: bool = False,
    trans_b: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same in plain torch; on float64 the result is float64, whatever `out_dtype` says."""
    return product_along_k(_arguments(a, b, ends, c, scale_a, scale_b, trans_a, trans_b, out_dtype))


FORWARD = RawOp(
    OP,
    "fwd",
    KGroupedArgs,
    package="tilewright.ops.gemm",
    kernels=("sm90.dense", "sm90.fp8", "triton.k_grouped"),
    outputs=lambda args: (((args.ends.shape[0], args.a.shape[0], args.b.shape[1]), args.out_dtype),),
    reference=product_along_k,
    bucket=k_grouped_bucket,
    bucket_names=KGroupedBucket._fields,
    batch_fields=("T",),
    dtypes=(*RESULTS, FP8),
    out=True,
    reference_writes=True,
    refuses_out=refuses_out,
    direct=lambda out, args: copyable(out) or not k_grouped_bucket(args).aligned,
)


def check(args: KGroupedArgs) -> None:
    """Raises InputError for what the docstring of `k_grouped_matmul` excludes."""
    a, b, scale_a, scale_b, c, ends, out_dtype = args
    check_operands(OP, a, b)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise InputError(
            f"{OP}: op(a) is {tuple(a.shape)} and op(b) is {tuple(b.shape)}; needs (M, T) and (T, N) of one T. "
            "trans_a=True and trans_b=True swap the dimensions."
        )
    check_strides(OP, a, b)
    check_out_dtype(OP, a.dtype, out_dtype)
    check_sizes(OP, "ends", ends, a, ends.shape[0] if isinstance(ends, Tensor) and ends.dim() == 1 else 0)
    check_epilogue(OP, (ends.shape[0], a.shape[0], b.shape[1]), a, None, c, "")
    check_scales(OP, a, b, scale_a, scale_b)
    check_gradient(OP, a, b, "")


# What the bench measures: groups of uneven sizes, in every other case some empty.  Results of bfloat16 are what torch's
# grouped product makes; of float32, what training adds up.
SIZES = ((4096, 7168), (7168, 2048))
"""(M, N) of a weight gradient."""
SPLITS = ((4, 4096, "random"), (8, 4096, "sparse"))
"""Groups, rows a group has on average, and how they differ."""


def _row(g: int, k: int, split: str, m: int, n: int, dtype: torch.dtype, **options: Any) -> Workload:
    into = "_to_bf16" if options.get("out_dtype") else ""
    name = f"{'fp8' if dtype.itemsize == 1 else 'bf16'}_{g}x{k}_{m}x{n}{into}"
    return Workload(name, {"G": g, "M": m, "N": n, "K": k, "split": split, **options}, (dtype,), ("fwd",))


WORKLOADS = (
    *(
        _row(g, k, split, m, n, torch.bfloat16, out_dtype=out_dtype)
        for out_dtype in (torch.bfloat16, None)
        for g, k, split in SPLITS
        for m, n in SIZES
    ),
    *(
        _row(g, k, split, m, n, torch.float8_e4m3fn, scaling=int(Scaling.TOKEN_TOKEN), layout="nt")
        for g, k, split in SPLITS
        for m, n in SIZES
    ),
)
CPU_WORKLOADS = (Workload("small", {"G": 4, "M": 64, "N": 128, "K": 64, "split": "random"}, directions=("fwd",)),)


def _case(name: str, g: int, m: int, n: int, k: int, **options: Any) -> Workload:
    return Workload(name, {"G": g, "M": m, "N": n, "K": k, **options})


EDGE_CASES = (
    _case("even: a tile and a bit in all sizes", 2, 70, 72, 72),
    _case("ragged: groups begin at any row", 5, 24, 40, 30, split="random"),
    _case("one: a single group has all rows", 3, 20, 72, 40, split="one"),
    _case("sparse: empty groups are zeros", 5, 20, 40, 24, split="sparse"),
    _case("accumulate: empty groups are c", 4, 20, 40, 24, split="sparse", c=True),
    _case("odd_sizes: no row is aligned", 3, 7, 33, 45, split="random"),
    _case("nt: both operands along T", 3, 20, 72, 40, layout="nt", split="random"),
    _case("nn: a along T, b along N", 3, 20, 72, 40, layout="nn", split="random"),
    _case("bfloat16: a gradient as narrow as its weight", 3, 20, 72, 40, out_dtype=torch.bfloat16, split="random"),
    _case("empty: nothing to sum", 3, 24, 40, 0),
)

CONTRACT = register(
    Contract(
        name=OP,
        family="grouped",
        summary="products summed over groups of rows: gradients of experts' weights",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=samples.along_k,
        cost=samples.along_k_cost,
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=EDGE_CASES,
        bad_inputs=samples.BAD_ALONG_K,
        batch_dim=None,
        in_place=("c",),
    )
)
