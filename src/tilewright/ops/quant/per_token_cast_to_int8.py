"""Activations to int8, a scale for each row; and weights, whose rows are output channels."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.quant import samples
from tilewright.ops.quant.casts import cast_contract
from tilewright.ops.quant.formats import SOURCES, check_matrix, check_no_gradient
from tilewright.ops.quant.int8 import quantise_rows
from tilewright.ops.quant.layout import ROW

OP = "per_token_cast_to_int8"


class PerTokenCastInt8Args(NamedTuple):
    x: Tensor  # (..., M, K)
    smooth: Tensor | None  # (K,)


class PerTokenCastInt8Bucket(NamedTuple):
    M: int  # rounded up to a power of two
    K: int
    smooth: int  # rows are divided first


@dispatch(OP)
def per_token_cast_to_int8(
    x: Tensor, *, smooth: Tensor | None = None, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """(q, scales) with q * scales close to x / smooth: scale = amax / 127 of a row, q rounded to nearest even.

    x: (..., M, K) bf16|fp16|fp32; any row stride; other strides cost a copy.   Rows are tokens, or output channels of a
    weight (N, K).   smooth: (K,) bf16|fp16|fp32, divisors of the channels (SmoothQuant, arXiv 2211.10438): a weight
    that was multiplied by them, as `nn.smoothing_factors` makes them, gives the same product.
    q: (..., M, K) int8, from -127 to 127.   scales: (..., M, 1) float32, as `int8_matmul` reads them.

    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Every backend gives the same bits; `quant/int8.py` has the arithmetic.  A row with a NaN or an infinity, also one
    that a divisor of 0 makes, has it as its scale and zeros as q: dequantised, all of the row is NaN.
    There is no gradient.   Raises InputError for other dtypes, fewer than two dimensions, a smooth of another size, and
    where a gradient is wanted.
    """
    smooth = smooth.contiguous() if isinstance(smooth, Tensor) and smooth.layout is torch.strided else smooth
    result: tuple[Tensor, Tensor] = call(CONTRACT, PerTokenCastInt8Args(x, smooth), backend)
    return result


def reference(x: Tensor, *, smooth: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same in plain torch; every backend gives these very bits, which need no finer oracle."""
    x_fp32 = x.to(torch.float32)
    q, scales = quantise_rows(x_fp32 if smooth is None else x_fp32 / smooth.to(torch.float32))
    return q, scales.unsqueeze(-1)


FORWARD = RawOp(
    OP,
    "fwd",
    PerTokenCastInt8Args,
    package="tilewright.ops.quant",
    kernels=("triton.per_token_cast_int8",),
    outputs=lambda args: ((args.x.shape, torch.int8), ((*args.x.shape[:-1], 1), torch.float32)),
    reference=lambda args: reference(args.x, smooth=args.smooth),
    bucket=lambda args: PerTokenCastInt8Bucket(*rows.rows_bucket(args.x), int(args.smooth is not None)),
    bucket_names=PerTokenCastInt8Bucket._fields,
    count=2,
)


def check(args: PerTokenCastInt8Args) -> None:
    """Raise InputError for what the docstring of `per_token_cast_to_int8` excludes."""
    x, smooth = args
    check_matrix(OP, x)
    if smooth is None:
        return
    if not isinstance(smooth, Tensor) or smooth.dtype not in SOURCES:
        got = smooth.dtype if isinstance(smooth, Tensor) else f"a {type(smooth).__name__}"
        raise InputError(f"{OP}: smooth is {got}; needs a tensor of bfloat16, float16 or float32.")
    if tuple(smooth.shape) != (x.shape[-1],):
        raise InputError(f"{OP}: smooth is {tuple(smooth.shape)}; needs ({x.shape[-1]},), a divisor for each channel.")
    if smooth.device != x.device:
        raise InputError(f"{OP}: smooth is on {smooth.device}, x on {x.device}. Move them to one device.")
    check_no_gradient(OP, smooth)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M (rows), N (columns), optional B, scale, special; smooth, for divisors from 1/4 to 4."""
    x = samples.matrix(params, dtype, device, seed)
    if not params.get("smooth"):
        return Sample((x,))
    exponents = 4 * torch.rand(params["N"], generator=rows.generator(seed + 1)) - 2
    return Sample((x,), {"smooth": torch.exp2(exponents).to(device)})


def cost(sample: Sample, direction: str) -> Cost:
    """Reads x once, writes q and the scales."""
    return samples.cast_cost(sample, ROW)


CONTRACT = register(
    replace(
        cast_contract(
            FORWARD,
            summary="bf16 rows to int8 with a scale for each row",
            reference=reference,
            check=check,
            cost=cost,
            batch_dim=0,
            workloads=(
                *samples.activations()[-12:],
                Workload("smooth_8192x4096", {"M": 8192, "N": 4096, "smooth": True}, directions=("fwd",)),
            ),
            edge_cases=(
                Workload("one_row: a single program", {"M": 1, "N": 256}),
                Workload("odd_n: rows that no vector divides", {"M": 7, "N": 333}),
                Workload("n_1: a row of one", {"M": 5, "N": 1}),
                Workload("batch: of matrices", {"B": 2, "M": 5, "N": 100}),
                Workload("smooth: divided first", {"M": 9, "N": 72, "smooth": True}),
                Workload("long: read twice", {"M": 2, "N": 20000}),
                Workload("special: NaN, infinities, zeros", {"M": 5, "N": 300, "special": True}),
                Workload("empty: no rows", {"M": 0, "N": 128}),
            ),
            bad_inputs=(
                samples.bad("a divisor a row", r"smooth is \(4,\); needs \(128,\)", 4, 128, smooth=torch.ones(4)),
                samples.bad("one divisor", "smooth is a float; needs a tensor", 4, 128, smooth=2.0),
                samples.bad(
                    "whole divisors", "smooth is torch.int32", 4, 128, smooth=torch.ones(128, dtype=torch.int32)
                ),
            ),
        ),
        inputs=inputs,
    )
)
