"""SiLU gate of a gate and an up tensor, quantised while the result is in registers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.activation import gated
from tilewright.ops.quant import samples
from tilewright.ops.quant.formats import SOURCES, check_no_gradient, pair
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.quant.numbers import cast


class SwigluFp8Args(NamedTuple):
    gate: Tensor  # (..., M, N)
    up: Tensor  # (..., M, N)
    ue8m0: bool


@dispatch("swiglu_fp8")
def swiglu_fp8(gate: Tensor, up: Tensor, *, ue8m0: bool = False, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """per_token_cast_to_fp8(swiglu(gate, up)) in one pass: silu(gate) * up is never written, only its e4m3 form.

    gate, up: (..., M, N) bf16|fp16|fp32, one shape and dtype.
    Returns q (..., M, N) float8_e4m3fn and scales (..., M, ceil(N / 128)) float32 in the layout TOKEN: one for 128
    elements of a row, those of consecutive rows adjacent in memory, as the GEMM kernels read them.

    The product is rounded to gate's dtype and then quantised: the bits of the two ops called one after the other.
    ue8m0: round scales up to powers of two.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.

    There is no gradient: this op is for inference, and e4m3 for the forward of a training step is cast from `swiglu`.
    Raises InputError for other dtypes, fewer than two dimensions, tensors that differ in shape, dtype or device, and
    tensors that require a gradient outside torch.no_grad().
    """
    result: tuple[Tensor, Tensor] = call(CONTRACT, SwigluFp8Args(gate, up, ue8m0), backend)
    return result


def reference(gate: Tensor, up: Tensor, *, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Plain torch, in two steps.  A float64 input is not rounded, see `ops/quant/numbers.py`."""
    return cast(gated.silu_mul(gate, up), TOKEN, ue8m0)


FORWARD = RawOp(
    "swiglu_fp8",
    "fwd",
    SwigluFp8Args,
    package="tilewright.ops.activation",
    kernels=("triton.silu_fp8",),
    outputs=lambda args: pair(args.gate.shape, TOKEN),
    reference=lambda args: reference(args.gate, args.up, ue8m0=args.ue8m0),
    bucket=lambda args: rows.rows_bucket(args.gate),
    bucket_names=rows.RowsBucket._fields,
    count=2,
)


def check(args: SwigluFp8Args) -> None:
    """Raise InputError for what the docstring of `swiglu_fp8` excludes."""
    gate, up = args.gate, args.up
    gated.check_split("swiglu_fp8", gate, up)
    if gate.dtype not in SOURCES:
        raise InputError(f"swiglu_fp8: gate is {gate.dtype}; needs one of bfloat16, float16, float32. Cast it first.")
    if gate.dim() < 2:
        raise InputError(f"swiglu_fp8: gate is {tuple(gate.shape)}; needs (..., M, N). Unsqueeze a vector.")
    check_no_gradient("swiglu_fp8", gate, up)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N, optional B, scale (of up), gate_scale, special, ue8m0, and halves=True for gate and up as views of
    one packed tensor.  Blocks of 128 columns differ in magnitude, so that an element with the wrong block's scale is
    far off.
    """
    up = samples.matrix(params, dtype, device, seed)
    gate = rows.random_tensor(up.shape, dtype, device, rows.generator(seed + 1), scale=params.get("gate_scale", 1.0))
    if params.get("halves", False):
        gate, up = gated.halves(torch.cat((gate, up), -1))
    return Sample((gate, up), {k: params[k] for k in ("ue8m0",) if k in params})


def cost(sample: Sample, direction: str) -> Cost:
    """Reads gate and up, writes q and the scales."""
    gate, up = sample.args
    written = samples.cast_cost(Sample((gate,)), TOKEN).bytes_written
    return Cost(13 * gate.numel(), rows.nbytes(gate, up), written)


WORKLOADS = (
    *(
        Workload(f"prefill_{m}x{n}", {"M": m, "N": n}, directions=("fwd",))
        for m in (4096, 8192)
        for n in (4096, 7168, 14336)
    ),
    Workload("deepseek_experts", {"B": 8, "M": 1024, "N": 2048}, directions=("fwd",)),
    *(Workload(f"decode_{m}", {"M": m, "N": 14336}, directions=("fwd",)) for m in (1, 4, 16, 64)),
)
EDGE_CASES = (
    Workload("one_row: fewer elements than one program takes", {"M": 1, "N": 96}),
    Workload("odd_n: the last group is cut, rows start unaligned", {"M": 7, "N": 333}),
    Workload("even_n: aligned rows, the last group is cut", {"M": 6, "N": 272}),
    Workload("n_1: a group of one", {"M": 5, "N": 1}),
    Workload("blocks: several programs a row, the last one partly masked", {"M": 3, "N": 5000}),
    Workload("tall: several programs a column, the last one partly masked", {"M": 70, "N": 130}),
    Workload("batch: each matrix has its own scales", {"B": 3, "M": 6, "N": 384}),
    Workload("ue8m0: powers of two", {"M": 33, "N": 512, "ue8m0": True}),
    Workload(
        "saturated: exp overflows on one side and vanishes on the other",
        {"M": 64, "N": 256, "scale": 0.1, "gate_scale": 100.0},
    ),
    Workload("tiny_values: amax below the floor of a scale", {"M": 4, "N": 256, "scale": 1e-3, "gate_scale": 1e-2}),
    Workload("special: NaN, infinities, zeros", {"M": 5, "N": 300, "special": True}),
    Workload("empty: no rows", {"M": 0, "N": 64}),
)


def ones(device: torch.device, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Sample:
    """Tensors of ones for a call that must fail."""
    return Sample(tuple(torch.ones(shape, device=device, dtype=dtype) for shape in shapes))


CONTRACT = register(
    Contract(
        name="swiglu_fp8",
        family="activation",
        summary="silu(gate) * up of two tensors, quantised to float8_e4m3 with a scale for each 128 elements",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        dtypes=SOURCES,
        workloads=WORKLOADS,
        cpu_workloads=samples.small(),
        edge_cases=(
            *EDGE_CASES,
            Workload("halves: gate and up are views of one packed tensor", {"M": 9, "N": 640, "halves": True}),
        ),
        bad_inputs=(
            *gated.SPLIT_BAD_INPUTS,
            BadInput("float64", lambda d: ones(d, (4, 8), (4, 8), dtype=torch.float64), "gate is torch.float64"),
            BadInput("vectors", lambda d: ones(d, (8,), (8,)), r"gate is \(8,\); needs \(..., M, N\)"),
        ),
    )
)
