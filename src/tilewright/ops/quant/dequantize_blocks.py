"""MXFP8, MXFP4 and NVFP4 back to wider dtypes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Promises, RawOp, Sample, Workload, call, dispatch, register
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.quant import microscale, samples
from tilewright.ops.quant.cast_to_blocks import check_tensor_scale
from tilewright.ops.quant.formats import SOURCES
from tilewright.ops.quant.microscale import E4M3, FORMATS, UINT8

OP = "dequantize_blocks"


class DequantizeBlocksArgs(NamedTuple):
    q: Tensor  # (..., M, K) or (..., M, K / 2), contiguous
    scales: Tensor  # (..., M, K / block), contiguous
    tensor_scale: Tensor | None  # (1,) float32, of nvfp4
    dtype: torch.dtype  # of the result


class DequantizeBlocksBucket(NamedTuple):
    M: int  # rounded up to a power of two
    K: int
    block: int
    bits: int
    out_bits: int


@dispatch(OP)
def dequantize_blocks(
    q: Tensor,
    scales: Tensor,
    tensor_scale: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """element * scale of its block (* scale of the tensor) in float32, rounded once to `dtype`: (..., M, K).

    q, scales, tensor_scale: as `cast_to_blocks` makes them.  Their dtypes name the format: uint8 with uint8 or
    float8_e8m0fnu is mxfp4, uint8 with float8_e4m3fn nvfp4, float8_e4m3fn with uint8 or float8_e8m0fnu mxfp8.  A q
    (..., M, K / 32, 16), the blocks of gpt-oss' checkpoints, is taken as (..., M, K / 2).
    dtype: bf16|fp16|fp32.   out: contiguous tensor to write instead of allocating.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.   Has no gradient.
    Raises InputError for other dtypes and for scales that do not fit.
    """
    q, scales = stored(q, scales)
    result: Tensor = call(CONTRACT, DequantizeBlocksArgs(q, scales, tensor_scale, dtype), backend, out)
    return result


def stored(q: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Returns q and scales contiguous, in our dtypes and dimensions."""
    if isinstance(scales, Tensor):
        scales = (scales.view(UINT8) if scales.dtype == torch.float8_e8m0fnu else scales).contiguous()
    if isinstance(q, Tensor):
        blocked = isinstance(scales, Tensor) and q.dim() == scales.dim() + 1 and q.shape[-1] == 16
        q = (q.flatten(-2) if blocked else q).contiguous()
    return q, scales


def reference(
    q: Tensor, scales: Tensor, tensor_scale: Tensor | None = None, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The same in plain torch."""
    double = torch.float64 in (q.dtype, scales.dtype)
    return microscale.restore(*stored(q, scales), tensor_scale).to(torch.float64 if double else dtype)


def depth_of(q: Tensor) -> int:
    """Returns K."""
    return q.shape[-1] * (2 if q.dtype == UINT8 else 1)


def _bucket(args: DequantizeBlocksArgs) -> DequantizeBlocksBucket:
    fmt = microscale.format_of(args.q, args.scales)
    assert fmt is not None, "checked"
    return DequantizeBlocksBucket(*rows.rows_bucket(args.q), fmt.block, fmt.bits, 8 * args.dtype.itemsize)


FORWARD = RawOp(
    OP,
    "fwd",
    DequantizeBlocksArgs,
    package="tilewright.ops.quant",
    kernels=("triton.dequantize_blocks",),
    outputs=lambda args: (((*args.q.shape[:-1], depth_of(args.q)), args.dtype),),
    reference=lambda args: reference(args.q, args.scales, args.tensor_scale, dtype=args.dtype),
    bucket=_bucket,
    bucket_names=DequantizeBlocksBucket._fields,
    dtypes=(UINT8, E4M3),
    out=True,
)


def check(args: DequantizeBlocksArgs) -> None:
    """Raise InputError for what the docstring of `dequantize_blocks` excludes."""
    q, scales, tensor_scale, dtype = args
    check_blocks(OP, q, scales, tensor_scale)
    if dtype not in SOURCES:
        raise InputError(f"{OP}: dtype is {dtype}; allowed are bfloat16, float16, float32.")


def check_blocks(op: str, q: Tensor, scales: Tensor, tensor_scale: Tensor | None) -> None:
    """Raise InputError unless the three are of one format."""
    for name, t in (("q", q), ("scales", scales)):
        if not isinstance(t, Tensor):
            raise InputError(f"{op}: {name} is a {type(t).__name__}; needs a torch.Tensor.")
    fmt = microscale.format_of(q, scales)
    if fmt is None or any(t.dtype not in (UINT8, E4M3, torch.float64) for t in (q, scales)):
        raise InputError(
            f"{op}: q is {q.dtype} and scales are {scales.dtype}; needs uint8 and uint8 (mxfp4), uint8 and "
            "float8_e4m3fn (nvfp4) or float8_e4m3fn and uint8 (mxfp8). cast_to_blocks makes them."
        )
    depth = depth_of(q)
    if q.dim() < 2 or depth % fmt.block or tuple(scales.shape) != (*q.shape[:-1], depth // fmt.block):
        raise InputError(
            f"{op}: q is {tuple(q.shape)} and scales are {tuple(scales.shape)}; {fmt.name} has one scale for each "
            f"{fmt.block} elements of a row, K={depth}."
        )
    if scales.device != q.device:
        raise InputError(f"{op}: scales are on {scales.device}, q on {q.device}. Move them to one device.")
    check_tensor_scale(op, tensor_scale, fmt.name, q)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N (columns, the K above), format, optional B, scale, special, dtype.  N is rounded up to 32."""
    x = samples.matrix({**params, "N": -(-params["N"] // 32) * 32}, torch.float32, device, seed)
    fmt = FORMATS[params["format"]]
    tensor_scale = microscale.tensor_scale_of(x) if fmt.name == "nvfp4" else None
    q, scales = microscale.quantise(x, fmt, tensor_scale)
    return Sample((q, scales, tensor_scale), {"dtype": params["dtype"]} if "dtype" in params else {})


def cost(sample: Sample, direction: str) -> Cost:
    """q and the scales are read once, the result is written: a product an element."""
    q, scales, _ = sample.args
    elements = q.shape[:-1].numel() * depth_of(q)
    return Cost(elements, rows.nbytes(q, scales), elements * sample.kwargs.get("dtype", torch.bfloat16).itemsize)


def _bad(name: str, match: str, q: Tensor, scales: Tensor, **options: Any) -> BadInput:
    return BadInput(name, lambda d: Sample((q.to(d), scales.to(d)), options), match)


def _case(name: str, m: int, n: int, format: str, **params: Any) -> Workload:
    return Workload(name, {"M": m, "N": n, "format": format, **params}, directions=("fwd",))


_Q, _S = torch.ones(4, 32, dtype=UINT8), torch.ones(4, 2, dtype=UINT8)

CONTRACT = register(
    Contract(
        name=OP,
        promises=Promises(reference_bits=True),
        family="quant",
        summary="MXFP8, MXFP4 and NVFP4 to bf16, fp16 or fp32",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        dtypes=(UINT8,),
        batch_dim=None,
        workloads=tuple(_case(f"{f}_{m}x{n}", m, n, f) for f in FORMATS for m, n in ((4096, 4096), (14336, 4096))),
        cpu_workloads=(_case("small", 64, 256, "mxfp4"),),
        edge_cases=(
            *(_case(f"{f}: rows that fill no program", 37, 384, f) for f in FORMATS),
            *(_case(f"{f}_special: NaN stays", 5, 320, f, special=True) for f in FORMATS),
            _case("batch: of matrices", 6, 64, "mxfp4", B=3),
            _case("one_block: of a vector", 1, 32, "mxfp4", dtype=torch.float16),
            _case("float32: nothing is rounded", 9, 64, "nvfp4", dtype=torch.float32),
        ),
        bad_inputs=(
            _bad("q is float32", "q is torch.float32 and scales are torch.uint8", _Q.float(), _S),
            _bad("too few scales", "one scale for each 32 elements of a row, K=64", _Q, _S[:, :1]),
            _bad("a double", "dtype is torch.float64", _Q, _S, dtype=torch.float64),
        ),
    )
)
