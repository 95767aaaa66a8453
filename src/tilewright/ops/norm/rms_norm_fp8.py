"""RMSNorm, quantised while the result is in registers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.ops import rows
from tilewright.ops.norm import rms_norm as rms
from tilewright.ops.quant import samples
from tilewright.ops.quant.formats import SOURCES, check_matrix, check_no_gradient, pair
from tilewright.ops.quant.layout import TOKEN
from tilewright.ops.quant.numbers import cast


class RmsNormFp8Args(NamedTuple):
    x: Tensor  # (..., M, N)
    weight: Tensor  # (N,)
    eps: float
    offset: float
    fp32_weight: bool
    ue8m0: bool


@dispatch("rms_norm_fp8")
def rms_norm_fp8(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    fp32_weight: bool = False,
    ue8m0: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """per_token_cast_to_fp8(rms_norm(x, weight)) in one pass: the normalised row is never written, only its e4m3 form.

    x: (..., M, N) bf16|fp16|fp32.   weight: (N,), any of these dtypes.
    Returns q (..., M, N) float8_e4m3fn and scales (..., M, ceil(N / 128)) float32 in the layout TOKEN: one for 128
    elements of a row, those of consecutive rows adjacent in memory, as the GEMM kernels read them.

    The norm is rounded to x's dtype and then quantised, the rounding points of the two ops called one after the other.
    eps, offset, fp32_weight: as in `rms_norm`.   ue8m0: round scales up to powers of two.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.

    There is no gradient: this op is for inference, and e4m3 for the forward of a training step is cast from `rms_norm`.
    Raises InputError for other dtypes, fewer than two dimensions, weight not (N,), tensors on different devices, and
    tensors that require a gradient outside torch.no_grad().
    """
    args = RmsNormFp8Args(x, weight, eps, offset, True if offset != 0.0 else fp32_weight, ue8m0)
    result: tuple[Tensor, Tensor] = call(CONTRACT, args, backend)
    return result


def reference(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    fp32_weight: bool = False,
    ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:
    """Plain torch, in two steps.  A float64 input is not rounded, see `ops/quant/numbers.py`."""
    y = rms.reference(x, weight, eps=eps, offset=offset, fp32_weight=fp32_weight)
    return cast(y.to(x.dtype), TOKEN, ue8m0)


def _forward(args: RmsNormFp8Args) -> tuple[Tensor, Tensor]:
    x, weight, eps, offset, fp32_weight, ue8m0 = args
    return reference(x, weight, eps=eps, offset=offset, fp32_weight=fp32_weight, ue8m0=ue8m0)


FORWARD = RawOp(
    "rms_norm_fp8",
    "fwd",
    RmsNormFp8Args,
    package="tilewright.ops.norm",
    kernels=("triton.rms_norm_fp8",),
    outputs=lambda args: pair(args.x.shape, TOKEN),
    reference=_forward,
    bucket=lambda args: rows.rows_bucket(args.x),
    bucket_names=rows.RowsBucket._fields,
    count=2,
)


def check(args: RmsNormFp8Args) -> None:
    """Raise InputError for what the docstring of `rms_norm_fp8` excludes."""
    check_matrix("rms_norm_fp8", args.x, form="(..., M, N)")
    rows.check_floating("rms_norm_fp8", x=args.x, weight=args.weight)
    rows.check_vector("rms_norm_fp8", args.x, weight=args.weight)
    check_no_gradient("rms_norm_fp8", args.weight)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N, optional B, scale, weight_dtype, offset, fp32_weight, eps, ue8m0.  Blocks of 128 columns differ in
    magnitude, so that an element with the wrong block's scale is far off.
    """
    x = samples.matrix(params, dtype, device, seed)
    weight = rows.random_tensor((params["N"],), params.get("weight_dtype", dtype), device, rows.generator(seed + 1))
    options = {k: params[k] for k in ("offset", "fp32_weight", "eps", "ue8m0") if k in params}
    return Sample((x, weight), options)


def cost(sample: Sample, direction: str) -> Cost:
    """Reads x and weight, writes q and the scales."""
    x, weight = sample.args
    written = samples.cast_cost(Sample((x,)), TOKEN).bytes_written
    return Cost(7 * x.numel(), rows.nbytes(x, weight), written)


def sizes(*ns: int) -> tuple[Workload, ...]:
    """Prefill workloads for each hidden size N, and decode workloads for the first."""
    prefill = tuple(
        Workload(f"prefill_{m}x{n}", {"M": m, "N": n}, directions=("fwd",)) for m in (4096, 8192) for n in ns
    )
    decode = tuple(Workload(f"decode_{m}", {"M": m, "N": ns[0]}, directions=("fwd",)) for m in (1, 4, 16, 64))
    return prefill + decode


EDGE_CASES = (
    Workload("one_row: a single program", {"M": 1, "N": 256}),
    Workload("odd_n: the last group is cut, rows start unaligned", {"M": 7, "N": 333}),
    Workload("even_n: aligned rows, the last group is cut", {"M": 6, "N": 272}),
    Workload("narrow: less than a group", {"M": 5, "N": 48}),
    Workload("n_1: a group of one", {"M": 5, "N": 1}),
    Workload("batch: each matrix has its own scales", {"B": 3, "M": 6, "N": 384}),
    Workload("long_row: read twice", {"M": 2, "N": 20000}),
    Workload("long_batch: read twice, in matrices", {"B": 2, "M": 3, "N": 16400}),
    Workload("ue8m0: powers of two", {"M": 33, "N": 512, "ue8m0": True}),
    Workload("gemma: offset 1 in float32", {"M": 33, "N": 512, "offset": 1.0}),
    Workload("olmo2: weight in float32, one rounding", {"M": 33, "N": 512, "fp32_weight": True}),
    Workload("mixed: float32 weight, the result has x's dtype", {"M": 9, "N": 128, "weight_dtype": torch.float32}),
    Workload("tiny_values: eps dominates", {"M": 4, "N": 64, "scale": 1e-5, "eps": 1e-6}),
    Workload("empty: no rows", {"M": 0, "N": 64}),
)


def ones(device: torch.device, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Sample:
    """Tensors of ones for a call that must fail."""
    return Sample(tuple(torch.ones(shape, device=device, dtype=dtype) for shape in shapes))


CONTRACT = register(
    Contract(
        name="rms_norm_fp8",
        family="norm",
        summary="RMS normalisation, quantised to float8_e4m3 with a scale for each 128 elements",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        dtypes=SOURCES,
        workloads=sizes(4096, 7168, 14336),
        cpu_workloads=samples.small(),
        edge_cases=EDGE_CASES,
        bad_inputs=(
            BadInput("weight too short", lambda d: ones(d, (4, 8), (7,)), r"weight is \(7,\); needs \(8,\)"),
            BadInput("weight 2-D", lambda d: ones(d, (4, 8), (1, 8)), r"needs \(8,\)"),
            BadInput("integers", lambda d: ones(d, (4, 8), (8,), dtype=torch.int32), "x is torch.int32"),
            BadInput("float64", lambda d: ones(d, (4, 8), (8,), dtype=torch.float64), "x is torch.float64"),
            BadInput("vector", lambda d: ones(d, (8,), (8,)), r"x is \(8,\); needs \(..., M, N\)"),
        ),
    )
)
