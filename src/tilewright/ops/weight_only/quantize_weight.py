"""A weight in 8 or 4 bits."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.arguments import as_int
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.dispatch.raw import OutputSpec
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.weight_only import packing


class QuantizeWeightArgs(NamedTuple):
    w: Tensor  # (N, K)
    bits: int


class QuantizeWeightBucket(NamedTuple):
    N: int  # rounded up to a power of two
    K: int
    bits: int


@dispatch("quantize_weight")
def quantize_weight(w: Tensor, *, bits: int = 8, group: int = 128, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """(q, scales) with w = q * scales, symmetric, a scale for each 128 elements of a row: what `weight_only_matmul`
    multiplies by.

    w: (N, K) bf16|fp16|fp32, a row for each output channel, as of `torch.nn.Linear`.
    q: (N, K) int8 for bits=8; for bits=4 (N, K / 2) uint8, K even, element 2 j in the low four bits of byte j.
    scales: (N, ceil(K / 128)), bf16, strides (1, pitch).   A group of zeros has scale 0.

    |w - q * scale| is at most half a scale; `packing.py` has the arithmetic.   Has no gradient.
    group: 128, the only size that kernels know.   backend: run on exactly this backend ("triton", "torch") or raise
    BackendError.   Raises InputError for other dtypes, ranks, bits and groups, and for an odd K at 4 bits.
    """
    if as_int("quantize_weight", "group", group) != packing.GROUP:
        raise InputError(f"quantize_weight: group is {group!r}; kernels know groups of {packing.GROUP} alone.")
    result: tuple[Tensor, Tensor] = call(CONTRACT, QuantizeWeightArgs(w, bits), backend)
    return result


def reference(w: Tensor, *, bits: int = 8, group: int = 128) -> tuple[Tensor, Tensor]:
    """The same in plain torch; every backend gives these very bits."""
    return packing.quantise(w, bits)


def _outputs(args: QuantizeWeightArgs) -> tuple[OutputSpec, ...]:
    n, k = args.w.shape
    dtype = torch.float64 if args.w.dtype == torch.float64 else torch.bfloat16
    q = ((n, k), torch.int8) if args.bits == 8 else ((n, k // 2), torch.uint8)
    if dtype == torch.float64:
        return q, ((n, packing.groups(k)), dtype)
    return q, ((n, packing.groups(k)), dtype, packing.layout(dtype).strides(n, k))


FORWARD = RawOp(
    "quantize_weight",
    "fwd",
    QuantizeWeightArgs,
    package="tilewright.ops.weight_only",
    kernels=("triton.quantize_weight",),
    outputs=_outputs,
    reference=lambda args: packing.quantise(args.w, args.bits),
    bucket=lambda args: QuantizeWeightBucket(row_bucket(args.w.shape[0]), hint(args.w.shape[1]), args.bits),
    bucket_names=QuantizeWeightBucket._fields,
    count=2,
)


def check(args: QuantizeWeightArgs) -> None:
    """Raise InputError for what the docstring of `quantize_weight` excludes."""
    w, bits = args
    rows.check_floating("quantize_weight", w=w)
    if w.dim() != 2:
        raise InputError(f"quantize_weight: w is {tuple(w.shape)}; needs (N, K). Flatten leading dimensions.")
    if bits not in packing.INVERSE:
        raise InputError(f"quantize_weight: bits is {bits!r}; allowed are 8 and 4.")
    if bits == 4 and w.shape[1] % 2:
        raise InputError(f"quantize_weight: K is {w.shape[1]}; two elements share a byte at 4 bits, K must be even.")
    if torch.is_grad_enabled() and w.requires_grad:
        raise InputError("quantize_weight: w requires a gradient, and rounding has none. Use w.detach().")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: N, K, optional bits, log_uniform (rows and groups of magnitudes over twelve octaves), zeros (a group)."""
    g = rows.generator(seed)
    n, k = params["N"], params["K"]
    w = rows.random_tensor((n, k), torch.float32, device, g, max(k, 1) ** -0.5)
    if params.get("log_uniform"):
        octaves = 12 * torch.rand((n, packing.groups(k)), generator=g) - 6
        w = w * torch.exp2(octaves).to(device).repeat_interleave(packing.GROUP, 1)[:, :k]
    if params.get("zeros"):
        w[:, : packing.GROUP] = 0
    return Sample((w.to(dtype),), {"bits": params["bits"]} if "bits" in params else {})


def cost(sample: Sample, direction: str) -> Cost:
    """w is read once, q and the scales are written; a maximum, a product and a rounding an element."""
    (w,) = sample.args
    n, k = w.shape
    q = n * k * sample.kwargs.get("bits", 8) // 8
    return Cost(3 * w.numel(), rows.nbytes(w), q + n * packing.groups(k) * 2)


def _bad(name: str, match: str, *shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> BadInput:
    return BadInput(name, lambda d: Sample((torch.ones(shape, device=d).to(dtype),), options), match)


def _case(name: str, n: int, k: int, **params: Any) -> Workload:
    return Workload(name, {"N": n, "K": k, **params}, directions=("fwd",))


CONTRACT = register(
    Contract(
        name="quantize_weight",
        family="weight_only",
        summary="a weight as 8 or 4-bit integers with a scale for each 128 of K",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        workloads=(
            _case("llama8b_gate_up_int8", 28672, 4096),
            _case("llama8b_gate_up_int4", 28672, 4096, bits=4),
            _case("dsv3_7168x16384_int4", 7168, 16384, bits=4),
        ),
        cpu_workloads=(_case("small", 256, 512),),
        edge_cases=(
            _case("whole: groups without a tail", 37, 384),
            _case("ragged: the last group is short", 70, 200),
            _case("int4: two elements a byte", 70, 200, bits=4),
            _case("int4_short: a single group of few", 9, 6, bits=4),
            _case("odd_k: rows begin anywhere", 21, 131),
            _case("one_row: a vector", 1, 640, bits=4),
            _case("k_1: a group of one", 40, 1),
            _case("zeros: a group that has no scale", 12, 256, zeros=True),
            _case("log_uniform: a wrong scale shows", 48, 512, log_uniform=True),
            _case("log_uniform_int4: a wrong scale shows", 48, 384, log_uniform=True, bits=4),
        ),
        bad_inputs=(
            _bad("integers", "w is torch.int32; needs one of", 4, 8, dtype=torch.int32),
            _bad("a vector", r"w is \(8,\); needs \(N, K\)", 8),
            _bad("two bits", "bits is 2; allowed are 8 and 4", 4, 8, bits=2),
            _bad("odd K at 4 bits", "K is 7; two elements share a byte", 4, 7, bits=4),
            _bad("another group", "group is 64; kernels know groups of 128", 4, 128, group=64),
        ),
    )
)
