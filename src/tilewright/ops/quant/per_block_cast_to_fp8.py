"""Weights to e4m3, a scale for each block of 128 x 128."""

from typing import NamedTuple

from torch import Tensor

from tilewright.dispatch import RawOp, Workload, call, dispatch, register
from tilewright.ops.quant import samples
from tilewright.ops.quant.casts import StripCastArgs, cast_contract
from tilewright.ops.quant.formats import pair
from tilewright.ops.quant.layout import BLOCK
from tilewright.ops.quant.numbers import cast
from tilewright.ops.rows import rows_bucket

OP = "per_block_cast_to_fp8"


class PerBlockCastBucket(NamedTuple):
    N: int  # rounded up to a power of two
    K: int
    transpose: int


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
    result: tuple[Tensor, Tensor] = call(CONTRACT, StripCastArgs(x, transpose, ue8m0), backend)
    return result


def reference(x: Tensor, *, transpose: bool = False, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Plain torch; a float64 input is not rounded, see `numbers`."""
    return cast(x.mT if transpose else x, BLOCK, ue8m0)


FORWARD = RawOp(
    OP,
    "fwd",
    StripCastArgs,
    package="tilewright.ops.quant",
    kernels=("triton.strip_cast",),
    outputs=lambda args: pair(args.x.mT.shape if args.transpose else args.x.shape, BLOCK),
    reference=lambda args: reference(args.x, transpose=args.transpose, ue8m0=args.ue8m0),
    bucket=lambda args: PerBlockCastBucket(*rows_bucket(args.x), int(args.transpose)),
    bucket_names=PerBlockCastBucket._fields,
    count=2,
)

CONTRACT = register(
    cast_contract(
        FORWARD,
        summary="weights to float8_e4m3 with a scale for each 128 x 128 block, transposed on request",
        reference=reference,
        cost=lambda sample, direction: samples.cast_cost(sample, BLOCK),
        form="(..., N, K)",
        options=("transpose", "ue8m0"),
        workloads=(*samples.workloads(), *samples.workloads("transposed_", transpose=True)),
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
    )
)
