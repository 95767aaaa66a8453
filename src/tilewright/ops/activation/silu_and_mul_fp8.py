"""SiLU gate of a packed tensor, quantised while the result is in registers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, RawOp, Sample, call, dispatch, register
from tilewright.ops import rows
from tilewright.ops.activation import gated, swiglu_fp8
from tilewright.ops.quant import samples
from tilewright.ops.quant.formats import SOURCES, check_matrix, pair
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.quant.numbers import cast


class SiluAndMulFp8Args(NamedTuple):
    x: Tensor  # (..., M, 2N)
    ue8m0: bool


@dispatch("silu_and_mul_fp8")
def silu_and_mul_fp8(x: Tensor, *, ue8m0: bool = False, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """per_token_cast_to_fp8(silu_and_mul(x)) in one pass: gate is the first half of x's last dimension, up the second.

    x: (..., M, 2N) bf16|fp16|fp32.
    Returns q (..., M, N) float8_e4m3fn and scales (..., M, ceil(N / 128)) float32 in the layout TOKEN.
    Rounding, ue8m0, backend: as in `swiglu_fp8`.  There is no gradient.

    Raises InputError for other dtypes, fewer than two dimensions, an odd last dimension, and an x that requires a
    gradient outside torch.no_grad().
    """
    result: tuple[Tensor, Tensor] = call(CONTRACT, SiluAndMulFp8Args(x, ue8m0), backend)
    return result


def reference(x: Tensor, *, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Plain torch, in two steps.  A float64 input is not rounded, see `ops/quant/numbers.py`."""
    return cast(gated.silu_mul(*gated.halves(x)), TOKEN, ue8m0)


FORWARD = RawOp(
    "silu_and_mul_fp8",
    "fwd",
    SiluAndMulFp8Args,
    package="tilewright.ops.activation",
    kernels=("triton.silu_fp8",),
    outputs=lambda args: pair(gated.packed_shape(args.x), TOKEN),
    reference=lambda args: reference(args.x, ue8m0=args.ue8m0),
    bucket=lambda args: gated.packed_bucket(args.x),
    bucket_names=rows.RowsBucket._fields,
    count=2,
)


def check(args: SiluAndMulFp8Args) -> None:
    """Raise InputError for what the docstring of `silu_and_mul_fp8` excludes."""
    check_matrix("silu_and_mul_fp8", args.x, form="(..., M, 2N)")
    gated.check_packed("silu_and_mul_fp8", args.x)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: as in `swiglu_fp8`.  x is (M, 2N)."""
    halves = swiglu_fp8.inputs(params, dtype, device, seed)
    return Sample((torch.cat(halves.args, -1),), halves.kwargs)


CONTRACT = register(
    Contract(
        name="silu_and_mul_fp8",
        family="activation",
        summary="silu(gate) * up, packed in the last dimension, to float8_e4m3 with a scale for each 128 elements",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=lambda sample, direction: swiglu_fp8.cost(Sample(gated.halves(*sample.args)), direction),
        dtypes=SOURCES,
        workloads=swiglu_fp8.WORKLOADS,
        cpu_workloads=samples.small(),
        edge_cases=swiglu_fp8.EDGE_CASES,
        bad_inputs=(
            *gated.PACKED_BAD_INPUTS[:2],
            BadInput("float64", lambda d: swiglu_fp8.ones(d, (4, 8), dtype=torch.float64), "x is torch.float64"),
            BadInput("vector", lambda d: swiglu_fp8.ones(d, (8,)), r"x is \(8,\); needs \(..., M, 2N\)"),
        ),
    )
)
