"""Weights to e4m3, a scale for each block of 128 x 128.  The contract."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Promises, RawOp, Sample, Workload, call, dispatch, register
from tilewright.ops.quant import samples
from tilewright.ops.quant.formats import SOURCES, check_matrix, pair
from tilewright.ops.quant.layout import BLOCK
from tilewright.ops.quant.numbers import cast
from tilewright.ops.rows import rows_bucket

OP = "per_block_cast_to_fp8"


@dispatch(OP)
def per_block_cast_to_fp8(
    x: Tensor, *, transpose: bool = False, ue8m0: bool = False, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """(q, scales) of weights x (..., N, K): scale = max(amax, 1e-4) / 448 over 128 x 128 elements.

    x: (..., N, K) bf16|fp16|fp32; any row stride; other strides cost a copy.
    q: (..., N, K) float8_e4m3fn.      scales: (..., ceil(N / 128), ceil(K / 128)) float32 in the layout BLOCK.
    transpose=True   q: (..., K, N), contiguous, and scales: (..., ceil(K / 128), ceil(N / 128)), in the same pass over
                     x: the weights of the gradient dX = dY @ W, whose K is N.
    ue8m0            round scales up to powers of two.
    backend          run on exactly this backend ("triton", "torch") or raise BackendError.

    NaN, infinities, gradients and errors as in `per_token_cast_to_fp8`.
    """
    result: tuple[Tensor, Tensor] = call(CONTRACT, (x, transpose, ue8m0), backend)
    return result


def reference(x: Tensor, *, transpose: bool = False, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Plain torch; a float64 input is not rounded, see `numbers`."""
    return cast(x.mT if transpose else x, BLOCK, ue8m0)


def _raw(x: Tensor, transpose: bool, ue8m0: bool) -> tuple[Tensor, Tensor]:
    return reference(x, transpose=transpose, ue8m0=ue8m0)


FORWARD = RawOp(
    OP,
    "fwd",
    "Tensor x, bool transpose, bool ue8m0",
    package=__name__,
    outputs=lambda x, transpose, ue8m0: pair(x.mT.shape if transpose else x.shape, BLOCK),
    reference=_raw,
    bucket=lambda x, transpose, _: (*rows_bucket(x), int(transpose)),
    bucket_names=("N", "K", "transpose"),
    count=2,
)


def check(x: Tensor, transpose: bool, ue8m0: bool) -> None:
    """Raises InputError for what the docstring of `per_block_cast_to_fp8` excludes."""
    check_matrix(OP, x, form="(..., N, K)")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M (rows, N of the docstring), N (columns, K), optional B, scale, special, transpose, ue8m0."""
    options = {name: params[name] for name in ("transpose", "ue8m0") if name in params}
    return Sample((samples.matrix(params, dtype, device, seed),), options)


def cost(sample: Sample, direction: str) -> Cost:
    """Reads x, writes q and the scales."""
    return samples.cast_cost(sample, BLOCK)


CONTRACT = register(
    Contract(
        name=OP,
        promises=Promises(reference_bits=True),
        family="quant",
        summary="weights to float8_e4m3 with a scale for each 128 x 128 block, transposed on request",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        dtypes=SOURCES,
        batch_dim=None,
        workloads=(*samples.workloads(), *samples.workloads("transposed_", transpose=True)),
        cpu_workloads=samples.small(),
        edge_cases=(
            Workload("odd: the last blocks are cut", {"M": 200, "N": 333}),
            Workload("odd_transposed: the last blocks are cut", {"M": 131, "N": 77, "transpose": True}),
            Workload("batch: experts", {"B": 3, "M": 130, "N": 140}),
            Workload("batch_transposed: experts", {"B": 2, "M": 130, "N": 140, "transpose": True}),
            Workload("one_row: less than a block", {"M": 1, "N": 256}),
            Workload("n_1: one column", {"M": 300, "N": 1, "transpose": True}),
            Workload("ue8m0: powers of two", {"M": 256, "N": 128, "ue8m0": True}),
            Workload("tiny: amax below the floor", {"M": 128, "N": 128, "scale": 1e-7}),
            Workload("special: NaN, infinities, zeros", {"M": 140, "N": 300, "special": True}),
            Workload("empty: no rows", {"M": 0, "N": 128}),
        ),
        bad_inputs=(
            samples.bad("integers", "x is torch.int32", 4, 128, dtype=torch.int32),
            samples.bad("vector", r"needs \(..., N, K\)", 128),
            BadInput("not a tensor", lambda d: Sample(([1.0],)), "x is a list"),
        ),
    )
)
