"""Operands of a weight gradient to e4m3, a scale for each 128 elements of a column."""

from typing import NamedTuple

from torch import Tensor

from tilewright.dispatch import RawOp, Workload, call, dispatch, register
from tilewright.ops.quant import samples
from tilewright.ops.quant.casts import StripCastArgs, cast_contract
from tilewright.ops.quant.formats import CHANNEL, pair
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.quant.numbers import cast
from tilewright.ops.rows import rows_bucket

OP = "per_channel_cast_to_fp8"


class PerChannelCastBucket(NamedTuple):
    T: int  # rounded up to a power of two
    N: int
    transpose: int


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
    result: tuple[Tensor, Tensor] = call(CONTRACT, StripCastArgs(x, transpose, ue8m0), backend)
    return result


def reference(x: Tensor, *, transpose: bool = False, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Plain torch; a float64 input is not rounded, see `numbers`."""
    return cast(x.mT, TOKEN, ue8m0) if transpose else cast(x, CHANNEL, ue8m0)


FORWARD = RawOp(
    OP,
    "fwd",
    StripCastArgs,
    package="tilewright.ops.quant",
    kernels=("triton.strip_cast",),
    outputs=lambda args: pair(args.x.mT.shape, TOKEN) if args.transpose else pair(args.x.shape, CHANNEL),
    reference=lambda args: reference(args.x, transpose=args.transpose, ue8m0=args.ue8m0),
    bucket=lambda args: PerChannelCastBucket(*rows_bucket(args.x), int(args.transpose)),
    bucket_names=PerChannelCastBucket._fields,
    count=2,
)

CONTRACT = register(
    cast_contract(
        FORWARD,
        summary="bf16 to float8_e4m3 with a scale for each 128 elements of a column, transposed on request",
        reference=reference,
        cost=lambda sample, direction: samples.cast_cost(sample, CHANNEL),
        form="(..., T, N)",
        options=("transpose", "ue8m0"),
        workloads=(
            *samples.activations("transposed_", transpose=True)[4:],
            *samples.activations()[-4:],
            *samples.workloads(transpose=True),
        ),
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
    )
)
