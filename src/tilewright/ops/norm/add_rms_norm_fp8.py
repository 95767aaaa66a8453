"""Residual add, RMSNorm and quantisation in one pass."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, RawOp, Sample, call, dispatch, register
from tilewright.ops import rows
from tilewright.ops.norm import rms_norm_fp8 as rms
from tilewright.ops.quant import samples
from tilewright.ops.quant.formats import SOURCES, check_matrix, check_no_gradient, pair
from tilewright.ops.quant.layout import TOKEN


class AddRmsNormFp8Args(NamedTuple):
    x: Tensor  # (..., M, N)
    residual: Tensor  # (..., M, N)
    weight: Tensor  # (N,)
    eps: float
    offset: float
    fp32_weight: bool
    ue8m0: bool


@dispatch("add_rms_norm_fp8")
def add_rms_norm_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    fp32_weight: bool = False,
    ue8m0: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(*rms_norm_fp8(x + residual), x + residual): the sum is rounded to its dtype first, and kept for the next layer.

    x, residual: (..., M, N) bf16|fp16|fp32, one shape and dtype.   weight: (N,).
    Returns q (..., M, N) float8_e4m3fn, scales (..., M, ceil(N / 128)) in the layout TOKEN, sum (..., M, N).
    eps, offset, fp32_weight, ue8m0, backend: as in `rms_norm_fp8`.  Neither input is written, and there is no gradient.
    Raises InputError for different shapes, dtypes or devices of x and residual, and for what `rms_norm_fp8` refuses.
    """
    args = AddRmsNormFp8Args(x, residual, weight, eps, offset, True if offset != 0.0 else fp32_weight, ue8m0)
    result: tuple[Tensor, Tensor, Tensor] = call(CONTRACT, args, backend)
    return result


def reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    fp32_weight: bool = False,
    ue8m0: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain torch."""
    total = x + residual
    q, scales = rms.reference(total, weight, eps=eps, offset=offset, fp32_weight=fp32_weight, ue8m0=ue8m0)
    return q, scales, total


def _forward(args: AddRmsNormFp8Args) -> tuple[Tensor, Tensor, Tensor]:
    x, residual, weight, eps, offset, fp32_weight, ue8m0 = args
    return reference(x, residual, weight, eps=eps, offset=offset, fp32_weight=fp32_weight, ue8m0=ue8m0)


FORWARD = RawOp(
    "add_rms_norm_fp8",
    "fwd",
    AddRmsNormFp8Args,
    package="tilewright.ops.norm",
    kernels=("triton.rms_norm_fp8",),
    outputs=lambda args: (*pair(args.x.shape, TOKEN), (args.x.shape, args.x.dtype)),
    reference=_forward,
    bucket=lambda args: rows.rows_bucket(args.x),
    bucket_names=rows.RowsBucket._fields,
    count=3,
)


def check(args: AddRmsNormFp8Args) -> None:
    """Raise InputError for what the docstring of `add_rms_norm_fp8` excludes."""
    check_matrix("add_rms_norm_fp8", args.x, form="(..., M, N)")
    rows.check_floating("add_rms_norm_fp8", x=args.x, residual=args.residual, weight=args.weight)
    rows.check_same("add_rms_norm_fp8", x=args.x, residual=args.residual)
    rows.check_vector("add_rms_norm_fp8", args.x, weight=args.weight)
    check_no_gradient("add_rms_norm_fp8", args.residual, args.weight)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: as in `rms_norm_fp8`."""
    sample = rms.inputs(params, dtype, device, seed)
    x, weight = sample.args
    return Sample((x, samples.matrix(params, dtype, device, seed + 2), weight), sample.kwargs)


def cost(sample: Sample, direction: str) -> Cost:
    """Reads x, residual and weight, writes q, the scales and the sum."""
    x, _, weight = sample.args
    written = samples.cast_cost(Sample((x,)), TOKEN).bytes_written
    return Cost(8 * x.numel(), rows.nbytes(x, x, weight), written + rows.nbytes(x))


def _mixed(device: torch.device) -> Sample:
    x, residual, weight = rms.ones(device, (4, 8), (4, 8), (8,)).args
    return Sample((x.bfloat16(), residual, weight))


CONTRACT = register(
    Contract(
        name="add_rms_norm_fp8",
        family="norm",
        summary="residual add, RMS normalisation, float8_e4m3 with a scale for each 128 elements; returns the sum too",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        dtypes=SOURCES,
        workloads=rms.sizes(4096, 7168, 14336),
        cpu_workloads=samples.small(),
        edge_cases=rms.EDGE_CASES,
        bad_inputs=(
            BadInput("shapes differ", lambda d: rms.ones(d, (4, 8), (4, 9), (8,)), "must have one shape and dtype"),
            BadInput("broadcast refused", lambda d: rms.ones(d, (4, 8), (1, 8), (8,)), "must have one shape and dtype"),
            BadInput("dtypes differ", _mixed, "must have one shape and dtype"),
            BadInput("vectors", lambda d: rms.ones(d, (8,), (8,), (8,)), r"x is \(8,\); needs \(..., M, N\)"),
        ),
    )
)
