"""Operands of a weight gradient to e4m3, a scale for each 128 elements of a column.  The contract."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Promises, RawOp, Sample, Workload, call, dispatch, register
from tilewright.ops.quant import samples
from tilewright.ops.quant.formats import CHANNEL, SOURCES, check_matrix, pair
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.quant.numbers import cast
from tilewright.ops.rows import rows_bucket

OP = "per_channel_cast_to_fp8"


@dispatch(OP)
def per_channel_cast_to_fp8(
    x: Tensor, *, transpose: bool = False, ue8m0: bool = False, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """(q, scales) of x (..., T, N), T tokens: scale = max(amax, 1e-4) / 448 over 128 tokens of one channel.

    A weight gradient sums over tokens, dW = dY^T @ X, so the blocks of its operands are along T.

    x: (..., T, N) bf16|fp16|fp32; any row stride; other strides cost a copy.
    q: (..., T, N) float8_e4m3fn.      scales: (..., ceil(T / 128), N) float32, in rows of a multiple of 16 bytes.
    transpose=True   q: (..., N, T), contiguous, and scales: (..., N, ceil(T / 128)) in the layout TOKEN, in the same
                     pass over x: what a GEMM with K = T reads.
    ue8m0            round scales up to powers of two.
    backend          run on exactly this backend ("triton", "torch") or raise BackendError.

    NaN, infinities, gradients and errors as in `per_token_cast_to_fp8`.
    """
    result: tuple[Tensor, Tensor] = call(CONTRACT, (x, transpose, ue8m0), backend)
    return result


def reference(x: Tensor, *, transpose: bool = False, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Plain torch; a float64 input is not rounded, see `numbers`."""
    return cast(x.mT, TOKEN, ue8m0) if transpose else cast(x, CHANNEL, ue8m0)


def _raw(x: Tensor, transpose: bool, ue8m0: bool) -> tuple[Tensor, Tensor]:
    return reference(x, transpose=transpose, ue8m0=ue8m0)


FORWARD = RawOp(
    OP,
    "fwd",
    "Tensor x, bool transpose, bool ue8m0",
    package=__name__,
    outputs=lambda x, transpose, ue8m0: pair(x.mT.shape, TOKEN) if transpose else pair(x.shape, CHANNEL),
    reference=_raw,
    bucket=lambda x, transpose, _: (*rows_bucket(x), int(transpose)),
    bucket_names=("T", "N", "transpose"),
    count=2,
)


def check(x: Tensor, transpose: bool, ue8m0: bool) -> None:
    """Raises InputError for what the docstring of `per_channel_cast_to_fp8` excludes."""
    check_matrix(OP, x, form="(..., T, N)")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M (rows, T of the docstring), N, optional B, scale, special, transpose, ue8m0."""
    options = {name: params[name] for name in ("transpose", "ue8m0") if name in params}
    return Sample((samples.matrix(params, dtype, device, seed),), options)


def cost(sample: Sample, direction: str) -> Cost:
    """Reads x, writes q and the scales."""
    return samples.cast_cost(sample, CHANNEL)


CONTRACT = register(
    Contract(
        name=OP,
        promises=Promises(reference_bits=True),
        family="quant",
        summary="bf16 to float8_e4m3 with a scale for each 128 elements of a column, transposed on request",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        dtypes=SOURCES,
        batch_dim=None,
        workloads=(
            *samples.activations("transposed_", transpose=True)[4:],
            *samples.activations()[-4:],
            *samples.workloads(transpose=True),
        ),
        cpu_workloads=samples.small(),
        edge_cases=(
            Workload("odd: the last blocks are cut", {"M": 200, "N": 77}),
            Workload("odd_transposed: the last blocks are cut", {"M": 131, "N": 77, "transpose": True}),
            Workload("batch: one step from matrix to matrix", {"B": 3, "M": 130, "N": 40}),
            Workload("batch_transposed: one step a matrix", {"B": 2, "M": 130, "N": 40, "transpose": True}),
            Workload("one_row: each element its own amax", {"M": 1, "N": 256}),
            Workload("n_1: one channel", {"M": 300, "N": 1}),
            Workload("n_1_transposed: one channel", {"M": 300, "N": 1, "transpose": True}),
            Workload("ue8m0: powers of two", {"M": 256, "N": 64, "ue8m0": True, "transpose": True}),
            Workload("tiny: amax below the floor", {"M": 128, "N": 16, "scale": 1e-7}),
            Workload("special: NaN, infinities, zeros", {"M": 140, "N": 70, "special": True}),
            Workload("empty: no tokens", {"M": 0, "N": 128}),
            Workload("empty_transposed: no tokens", {"M": 0, "N": 128, "transpose": True}),
        ),
        bad_inputs=(
            samples.bad("integers", "x is torch.int32", 4, 128, dtype=torch.int32),
            samples.bad("vector", r"needs \(..., T, N\)", 128),
            BadInput("not a tensor", lambda d: Sample(([1.0],)), "x is a list"),
        ),
    )
)
