"""An 8-bit or 4-bit weight converted to floating point."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.ops import rows
from tilewright.ops.weight_only import packing
from tilewright.ops.weight_only.checks import check_dtype, check_weight
from tilewright.ops.weight_only.samples import random_weight


class DequantizeWeightArgs(NamedTuple):
    q: Tensor  # (N, K) or (N, K / 2)
    scales: Tensor  # (N, groups)
    dtype: torch.dtype  # of the result


class DequantizeWeightBucket(NamedTuple):
    N: int  # rounded up to a power of two
    K: int
    bits: int
    out_bits: int


@dispatch("dequantize_weight")
def dequantize_weight(
    q: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16, backend: str | None = None
) -> Tensor:
    """q * scales as (N, K), multiplied in float32 and rounded once to `dtype`.

    q: (N, K) int8, or (N, K / 2) uint8 with two elements of 4 bits a byte.   scales: (N, ceil(K / 128)) bf16|fp16|fp32,
    of any strides.   dtype: bf16|fp16|fp32.   `quantize_weight` makes q and scales; packing.py says how they lie.
    With bf16 or fp16 scales the float32 product is exact.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.   Has no gradient.
    Raises InputError for other dtypes and for scales that do not fit.
    """
    q = q.contiguous() if isinstance(q, Tensor) else q
    result: Tensor = call(CONTRACT, DequantizeWeightArgs(q, scales, dtype), backend)
    return result


def reference(q: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The same in plain torch; with float64 scales the result is float64, whatever `dtype` says."""
    return packing.restore(q, scales).to(torch.float64 if scales.dtype == torch.float64 else dtype)


def _bucket(args: DequantizeWeightArgs) -> DequantizeWeightBucket:
    rows_up, depth = row_bucket(args.q.shape[0]), hint(packing.depth_of(args.q))
    return DequantizeWeightBucket(rows_up, depth, packing.bits_of(args.q), 8 * args.dtype.itemsize)


FORWARD = RawOp(
    "dequantize_weight",
    "fwd",
    DequantizeWeightArgs,
    package="tilewright.ops.weight_only",
    kernels=("triton.dequantize_weight",),
    outputs=lambda args: (((args.q.shape[0], packing.depth_of(args.q)), args.dtype),),
    reference=lambda args: reference(args.q, args.scales, dtype=args.dtype),
    bucket=_bucket,
    bucket_names=DequantizeWeightBucket._fields,
    dtypes=(torch.int8, torch.uint8),
)


def check(args: DequantizeWeightArgs) -> None:
    """Raise InputError for what the docstring of `dequantize_weight` excludes."""
    check_weight("dequantize_weight", args.q, args.scales)
    check_dtype("dequantize_weight", "dtype", args.dtype)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: N, K, optional scale_dtype.  `dtype` is that of q: int8, or uint8 for 4 bits."""
    bits = 4 if dtype == torch.uint8 else 8
    k = params["K"] + (params["K"] % 2 if bits == 4 else 0)
    scale_dtype = params.get("scale_dtype", torch.bfloat16)
    q, scales = random_weight(params["N"], k, bits, scale_dtype, device, rows.generator(seed))
    return Sample((q, scales), {"dtype": params["dtype"]} if "dtype" in params else {})


def cost(sample: Sample, direction: str) -> Cost:
    """q and the scales are read once, the weight is written; a product an element."""
    q, scales = sample.args
    elements = q.shape[0] * packing.depth_of(q)
    return Cost(elements, rows.nbytes(q, scales), elements * sample.kwargs.get("dtype", torch.bfloat16).itemsize)


def _bad(name: str, match: str, q: Any, scales: Any, **options: Any) -> BadInput:
    return BadInput(name, lambda d: Sample((q.to(d), scales.to(d)), options), match)


def _case(name: str, n: int, k: int, dtypes: tuple[torch.dtype, ...] = (torch.int8,), **params: Any) -> Workload:
    return Workload(name, {"N": n, "K": k, **params}, dtypes, directions=("fwd",))


CONTRACT = register(
    Contract(
        name="dequantize_weight",
        family="weight_only",
        summary="8 or 4-bit integers times the scales of their groups",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        dtypes=(torch.int8, torch.uint8),
        workloads=(_case("llama8b_gate_up", 28672, 4096, (torch.int8, torch.uint8)),),
        cpu_workloads=(_case("small", 256, 512),),
        edge_cases=(
            _case("whole: groups without a tail", 40, 384),
            _case("ragged: the last group is short", 70, 200),
            _case("odd_k: rows begin anywhere", 21, 131),
            _case("one_row: a vector", 1, 640),
            _case("float32: wider scales, nothing is rounded twice", 20, 256, scale_dtype=torch.float32),
            _case("float16: scales and result", 20, 256, scale_dtype=torch.float16, dtype=torch.float16),
            _case("exact: products in float32", 20, 256, dtype=torch.float32),
        ),
        bad_inputs=(
            _bad("float weights", "q is torch.float32; needs int8", torch.ones(4, 8), torch.ones(4, 1)),
            _bad("too few scales", r"scales is \(4, 1\); needs \(4, 2\)", torch.ones(4, 200).char(), torch.ones(4, 1)),
            _bad("a double", "dtype is torch.float64", torch.ones(4, 8).char(), torch.ones(4, 1), dtype=torch.float64),
        ),
    )
)
