"""A tensor to e4m3 with one scale."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.hardware import device_info
from tilewright.ops.quant import samples
from tilewright.ops.quant.casts import cast_contract
from tilewright.ops.quant.layout import TENSOR
from tilewright.ops.quant.numbers import E4M3, block_amax, quantise, scale_of
from tilewright.ops.rows import rows_bucket, whole_vectors

OP = "per_tensor_cast_to_fp8"


class PerTensorCastArgs(NamedTuple):
    x: Tensor  # (..., M, K)


class PerTensorCastBucket(NamedTuple):
    M: int  # rounded up to a power of two
    K: int
    vectors: int  # 1: one run of memory, of whole and aligned vectors


@dispatch(OP)
def per_tensor_cast_to_fp8(x: Tensor, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """(q, scale) with q * scale close to x: scale = max(amax, 1e-4) / 448 over all of x.

    x: (..., M, K) bf16|fp16|fp32; any row stride; other strides cost a copy.     q: like x, float8_e4m3fn.
    scale: (1, 1) float32 on the device, one for all matrices of a batch.
    backend: run on exactly this backend ("cuda", "triton", "torch") or raise BackendError.

    x is read twice, the first time for its scale: 5 bytes an element of a bf16 x much larger than the chip can hold
    move through memory, and 3 of one that stays on it.  A NaN or an infinity anywhere becomes the scale of all of x.
    Gradients and errors as in `per_token_cast_to_fp8`.
    """
    result: tuple[Tensor, Tensor] = call(CONTRACT, PerTensorCastArgs(x), backend)
    return result


def reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Plain torch; a float64 input is not rounded, see `numbers`."""
    scale = scale_of(block_amax(x.reshape(1, -1), TENSOR))
    return quantise(x, scale).contiguous(), scale


def bucket_of(args: PerTensorCastArgs) -> PerTensorCastBucket:
    """What a choice of kernel may depend on."""
    return PerTensorCastBucket(*rows_bucket(args.x), vectors=int(whole_vectors(args.x)))


FORWARD = RawOp(
    OP,
    "fwd",
    PerTensorCastArgs,
    package="tilewright.ops.quant",
    kernels=("sm90.per_tensor_cast", "triton.per_tensor_cast"),
    outputs=lambda args: ((args.x.shape, E4M3), ((1, 1), torch.float32)),
    reference=lambda args: reference(args.x),
    bucket=bucket_of,
    bucket_names=PerTensorCastBucket._fields,
    count=2,
)


_MULTIPROCESSOR = 484 << 10
"""Bytes of its registers and shared memory on Hopper and later."""


def cost(sample: Sample, direction: str) -> Cost:
    """Reads x, then the part that the chip cannot hold a second time, and writes q."""
    single_pass = samples.cast_cost(sample, TENSOR)
    device = device_info(sample.args[0].device)
    held_bytes = device.l2_bytes + (device.sm_count * _MULTIPROCESSOR if device.arch.startswith("sm_") else 0)
    reread_bytes = max(0, single_pass.bytes_read - held_bytes)
    return Cost(single_pass.flops, single_pass.bytes_read + reread_bytes, single_pass.bytes_written)


CONTRACT = register(
    cast_contract(
        FORWARD,
        summary="a tensor to float8_e4m3 with one scale",
        reference=reference,
        cost=cost,
        workloads=(*samples.activations()[4:], *samples.workloads()),
        edge_cases=(
            Workload("odd: the last block is cut", {"M": 37, "N": 333}),
            Workload("batch: one scale for all", {"B": 3, "M": 13, "N": 40}),
            Workload("one_row: less than a block", {"M": 1, "N": 256}),
            Workload("n_1: one column", {"M": 300, "N": 1}),
            Workload("several: more than one program", {"M": 200, "N": 300}),
            Workload("tiny: amax below the floor", {"M": 8, "N": 128, "scale": 1e-7}),
            Workload("special: everything is NaN", {"M": 14, "N": 70, "special": True}),
            Workload("empty: no rows", {"M": 0, "N": 128}),
        ),
    )
)
