"""e4m3 and its scales back to wider dtypes, for every granularity."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Promises, RawOp, Sample, Workload, call, dispatch, register
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.quant import samples
from tilewright.ops.quant.formats import CHANNEL, GRANULARITIES, SOURCES, check_no_gradient, granularity
from tilewright.ops.quant.layout import BLOCK, ROW, TENSOR, TOKEN, TOKEN_UE8M0, ScaleLayout
from tilewright.ops.quant.numbers import E4M3, cast, restore

OP = "dequantize"
_BF16 = torch.bfloat16
LAYOUTS = {"token": TOKEN, "block": BLOCK, "channel": CHANNEL, "row": ROW, "tensor": TENSOR, "packed": TOKEN_UE8M0}


class DequantizeArgs(NamedTuple):
    q: Tensor  # (..., M, K)
    scales: Tensor
    dtype: torch.dtype  # of the result


class DequantizeBucket(NamedTuple):
    M: int  # rounded up to a power of two
    K: int
    layout: int  # index in GRANULARITIES
    out_bits: int


@dispatch(OP)
def dequantize(
    q: Tensor,
    scales: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """q * scale in float32, rounded once to `dtype`: bf16|fp16|fp32.

    q: (..., M, K) float8_e4m3fn; any row stride; other strides cost a copy.      Returns (..., M, K), contiguous.
    scales: float32 of any strides; the shape says how many elements share one, as the casts of this family write them
      (..., M, ceil(K / 128))               128 elements of a row
      (..., ceil(M / 128), ceil(K / 128))   a block of 128 x 128
      (..., ceil(M / 128), K)               128 elements of a column
      (..., M, 1)                           a row
      (..., 1, 1)                           a matrix; (1, 1) also all of q
    or (..., M, ceil(K / 512)) int32: packed UE8M0.

    out: contiguous tensor to write instead of allocating.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for other dtypes, scales of another shape, and tensors that require a gradient.
    """
    result: Tensor = call(CONTRACT, DequantizeArgs(q, scales, dtype), backend, out)
    return result


def reference(q: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Plain torch; a q wider than e4m3, as the oracle has, keeps its dtype whatever `dtype` is."""
    layout = _layout(q, scales)
    return restore(q, scales, layout, dtype if q.dtype == E4M3 else q.dtype)


def _layout(q: Tensor, scales: Tensor) -> ScaleLayout:
    layout = granularity(q, scales)
    assert layout is not None, "checked"
    return layout


def _bucket(args: DequantizeArgs) -> DequantizeBucket:
    layout = GRANULARITIES.index(_layout(args.q, args.scales))
    return DequantizeBucket(*rows.rows_bucket(args.q), layout, 8 * args.dtype.itemsize)


FORWARD = RawOp(
    OP,
    "fwd",
    DequantizeArgs,
    package="tilewright.ops.quant",
    kernels=("triton.dequantize",),
    outputs=lambda args: ((args.q.shape, args.dtype),),
    reference=lambda args: reference(args.q, args.scales, dtype=args.dtype),
    bucket=_bucket,
    bucket_names=DequantizeBucket._fields,
    dtypes=(E4M3,),
    out=True,
)


def check(args: DequantizeArgs) -> None:
    """Raise InputError for what the docstring of `dequantize` excludes."""
    q, scales, dtype = args
    for name, t, allowed in (("q", q, (E4M3,)), ("scales", scales, (torch.float32, torch.int32))):
        if not isinstance(t, Tensor):
            raise InputError(f"{OP}: {name} is a {type(t).__name__}; needs a torch.Tensor.")
        if t.dtype not in allowed:
            raise InputError(f"{OP}: {name} is {t.dtype}; needs {' or '.join(map(str, allowed))}.")
        if t.dim() < 2:
            raise InputError(f"{OP}: {name} is {tuple(t.shape)}; needs two dimensions or more.")
    if scales.device != q.device:
        raise InputError(f"{OP}: scales are on {scales.device}, q on {q.device}. Move them to one device.")
    if dtype not in SOURCES:
        raise InputError(f"{OP}: dtype is {dtype}; allowed are bfloat16, float16, float32.")
    if granularity(q, scales) is None:
        shapes = {tuple(layout.shape(*q.shape[-2:])): None for layout in GRANULARITIES if layout.dtype == scales.dtype}
        batch = f", after the batch {tuple(q.shape[:-2])}" if q.dim() > 2 else ""
        raise InputError(
            f"{OP}: scales are {tuple(scales.shape)} {scales.dtype}; those of q {tuple(q.shape)} are one of "
            f"{', '.join(map(str, shapes))}{batch}."
        )
    check_no_gradient(OP, scales)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N (columns, K of the docstring), layout (a key of LAYOUTS), optional B, scale, special.

    `dtype` is that of the result; float8 stands for the default.
    """
    layout = LAYOUTS[params["layout"]]
    x = samples.matrix(params, torch.float32, device, seed)
    q, scales = cast(x, layout, layout is TOKEN_UE8M0)
    return Sample((q, scales), {} if dtype == E4M3 else {"dtype": dtype})


def cost(sample: Sample, direction: str) -> Cost:
    """Reads q and the scales, writes the result: a product an element."""
    q, scales = sample.args
    return Cost(q.numel(), rows.nbytes(q, scales), q.numel() * sample.kwargs.get("dtype", torch.bfloat16).itemsize)


def _bad(
    name: str,
    match: str,
    q: tuple[int, ...],
    scales: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, torch.float32),
    **options: Any,
) -> BadInput:
    def make(device: torch.device) -> Sample:
        return Sample(
            tuple(torch.ones(s, device=device).to(d) for s, d in zip((q, scales), dtypes, strict=True)), options
        )

    return BadInput(name, make, match)


def _row(layout: str, m: int, n: int) -> Workload:
    return Workload(f"{layout}_{m}x{n}", {"M": m, "N": n, "layout": layout}, directions=("fwd",))


CONTRACT = register(
    Contract(
        name=OP,
        promises=Promises(reference_bits=True),
        family="quant",
        summary="float8_e4m3 and its scales to bf16, fp16 or fp32",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        dtypes=SOURCES,
        batch_dim=None,
        workloads=(
            *(_row("token", m, n) for m in (64, 4096, 8192) for n in (4096, 7168, 14336, 16384)),
            *(_row("block", m, n) for m, n in samples.WEIGHTS),
            Workload("experts", {"B": 8, "M": 4096, "N": 7168, "layout": "block"}, directions=("fwd",)),
            *(_row(layout, 8192, 7168) for layout in ("channel", "row", "tensor", "packed")),
        ),
        cpu_workloads=samples.small(layout="token"),
        edge_cases=(
            Workload("token_odd: the last group is cut", {"M": 7, "N": 333, "layout": "token"}),
            Workload("token_batch: scales of each matrix", {"B": 3, "M": 6, "N": 384, "layout": "token"}),
            Workload("block: a cut block", {"M": 200, "N": 333, "layout": "block"}),
            Workload("block_batch: experts", {"B": 2, "M": 130, "N": 140, "layout": "block"}),
            Workload("channel: a scale for each column", {"M": 200, "N": 77, "layout": "channel"}),
            Workload("channel_batch: a scale for each column", {"B": 2, "M": 130, "N": 40, "layout": "channel"}),
            Workload("row: a scale for each row", {"M": 9, "N": 700, "layout": "row"}),
            Workload("row_batch: a scale for each row", {"B": 2, "M": 9, "N": 70, "layout": "row"}),
            Workload("tensor: one scale", {"M": 9, "N": 700, "layout": "tensor"}),
            Workload("tensor_batch: one scale a matrix", {"B": 2, "M": 9, "N": 70, "layout": "tensor"}),
            Workload("packed: four exponents a word", {"M": 33, "N": 650, "layout": "packed"}),
            Workload("special: NaN stays", {"M": 5, "N": 300, "layout": "token", "special": True}),
            Workload("packed_special: NaN stays", {"M": 5, "N": 300, "layout": "packed", "special": True}),
            Workload("empty: no rows", {"M": 0, "N": 128, "layout": "token"}),
        ),
        bad_inputs=(
            _bad("q is bf16", "q is torch.bfloat16; needs torch.float8", (4, 256), (4, 2), (_BF16, torch.float32)),
            _bad("scales are bf16", "scales is torch.bfloat16; needs torch.float32", (4, 256), (4, 2), (E4M3, _BF16)),
            _bad("vector", "needs two dimensions", (256,), (4, 2)),
            _bad("of another matrix", r"are \(4, 3\).*one of \(1, 1\), \(4, 1\), \(4, 2\)", (4, 256), (4, 3)),
            _bad("without the batch", r"after the batch \(2,\)", (2, 4, 256), (4, 2)),
            _bad("packed too wide", r"of q \(4, 256\) are one of \(4, 1\)", (4, 256), (4, 2), (E4M3, torch.int32)),
            _bad("result of 8 bits", "dtype is torch.float8_e4m3fn; allowed", (4, 256), (4, 2), dtype=E4M3),
        ),
    )
)
