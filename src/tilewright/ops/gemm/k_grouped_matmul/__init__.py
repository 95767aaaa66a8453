"""Sums over groups of rows: a matrix for each group, as gradients of experts' weights are.  The contract."""

import torch
from torch import Tensor

from tilewright.dispatch import Contract, call, dispatch, register
from tilewright.errors import InputError
from tilewright.ops.gemm.grouped import samples
from tilewright.ops.gemm.grouped.calls import contiguous, laid_out, transposed_scales
from tilewright.ops.gemm.grouped.reference import product_along_k
from tilewright.ops.gemm.k_grouped_matmul.raw import FORWARD, check
from tilewright.ops.gemm.k_grouped_matmul.workloads import CPU_WORKLOADS, EDGE_CASES, WORKLOADS
from tilewright.ops.gemm.operands import unit_stride

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
) -> tuple[object, ...]:
    left, right = (a.mT if trans_a else a), (b.mT if trans_b else b)
    scales = laid_out(OP, left, right, transposed_scales(scale_a, not trans_a), transposed_scales(scale_b, trans_b))
    if isinstance(c, Tensor) and c.dim() == 3 and c.stride(-1) != 1:
        c = c.contiguous()
    return unit_stride(left), unit_stride(right), *scales, c, contiguous(ends), out_dtype or _float(a)


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
    return product_along_k(*_arguments(a, b, ends, c, scale_a, scale_b, trans_a, trans_b, out_dtype))  # type: ignore[arg-type]


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
        in_place=(4,),
    )
)
