"""A tensor in MXFP8, MXFP4 or NVFP4."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Promises, RawOp, Sample, Workload, call, dispatch, register
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.quant import microscale, samples
from tilewright.ops.quant.formats import check_matrix
from tilewright.ops.quant.microscale import FORMATS

OP = "cast_to_blocks"


class CastToBlocksArgs(NamedTuple):
    x: Tensor  # (..., M, K), contiguous
    tensor_scale: Tensor | None  # (1,) float32, of nvfp4
    format: str


class CastToBlocksBucket(NamedTuple):
    M: int  # rounded up to a power of two
    K: int
    block: int
    bits: int


@dispatch(OP)
def cast_to_blocks(
    x: Tensor, *, format: str = "mxfp4", tensor_scale: Tensor | None = None, backend: str | None = None
) -> tuple[Tensor, ...]:
    """(q, scales) of x, with nvfp4 (q, scales, tensor_scale): numbers of 4 or 8 bits with a scale for a short block.

    x: (..., M, K) bf16|fp16|fp32, other strides than contiguous ones cost a copy; K a multiple of the block.
    format: "mxfp4" and "mxfp8", blocks of 32 with powers of two as scales, as the OCP MX specification 1.0 has them;
    "nvfp4", blocks of 16 with e4m3 scales and one float32 for the tensor.
    q: (..., M, K / 2) uint8, two e2m1 numbers a byte, or for mxfp8 (..., M, K) float8_e4m3fn.
    scales: (..., M, K / block), uint8 of E8M0 or float8_e4m3fn.   `microscale.py` has the layout and the arithmetic.
    tensor_scale: (1,) fp32, of nvfp4 alone; by default max |x| / 2688, which reads x once more.

    A block with a NaN or an infinity dequantises to NaN.   Has no gradient.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for other dtypes and formats, a K that blocks do not divide, and x that requires a gradient.
    """
    if format == "nvfp4" and tensor_scale is None and isinstance(x, Tensor) and x.dtype.is_floating_point:
        tensor_scale = microscale.tensor_scale_of(x)
    x = x.contiguous() if isinstance(x, Tensor) else x
    result: tuple[Tensor, ...] = call(CONTRACT, CastToBlocksArgs(x, tensor_scale, format), backend)
    return result if tensor_scale is None else (*result, tensor_scale)


def reference(x: Tensor, *, format: str = "mxfp4", tensor_scale: Tensor | None = None) -> tuple[Tensor, ...]:
    """The same in plain torch; every backend gives these very bits, which need no finer oracle."""
    if format == "nvfp4" and tensor_scale is None:
        tensor_scale = microscale.tensor_scale_of(x)
    result = microscale.quantise(x, FORMATS[format], tensor_scale)
    return result if tensor_scale is None else (*result, tensor_scale)


def _outputs(args: CastToBlocksArgs) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    fmt = FORMATS[args.format]
    *batch, depth = args.x.shape
    if args.x.dtype == torch.float64:  # the oracle
        return tuple((tuple(t.shape), t.dtype) for t in microscale.quantise(args.x, fmt, args.tensor_scale))
    return ((*batch, fmt.stored(depth)), fmt.element_dtype), ((*batch, depth // fmt.block), fmt.scale_dtype)


def _bucket(args: CastToBlocksArgs) -> CastToBlocksBucket:
    fmt = FORMATS[args.format]
    return CastToBlocksBucket(*rows.rows_bucket(args.x), fmt.block, fmt.bits)


FORWARD = RawOp(
    OP,
    "fwd",
    CastToBlocksArgs,
    package="tilewright.ops.quant",
    kernels=("triton.cast_to_blocks",),
    outputs=_outputs,
    reference=lambda args: microscale.quantise(args.x, FORMATS[args.format], args.tensor_scale),
    bucket=_bucket,
    bucket_names=CastToBlocksBucket._fields,
    count=2,
)


def check(args: CastToBlocksArgs) -> None:
    """Raise InputError for what the docstring of `cast_to_blocks` excludes."""
    x, tensor_scale, name = args
    if name not in FORMATS:
        raise InputError(f"{OP}: format is {name!r}; allowed are {', '.join(map(repr, FORMATS))}.")
    check_matrix(OP, x if not isinstance(x, Tensor) or x.dtype != torch.float64 else x.to(torch.float32))
    block = FORMATS[name].block
    if x.shape[-1] % block:
        raise InputError(f"{OP}: K is {x.shape[-1]}; {name} needs a multiple of {block}. Pad x with zeros.")
    check_tensor_scale(OP, tensor_scale, name, x)


def check_tensor_scale(op: str, tensor_scale: Tensor | None, name: str, tensor: Tensor) -> None:
    """Raise InputError unless nvfp4 alone has a scale of the tensor, one float32 on the device of `tensor`."""
    if name != "nvfp4":
        if tensor_scale is not None:
            raise InputError(f"{op}: tensor_scale is given, and {name} has none.")
        return
    if not isinstance(tensor_scale, Tensor) or tensor_scale.dtype != torch.float32 or tensor_scale.numel() != 1:
        received = (
            f"{tuple(tensor_scale.shape)} {tensor_scale.dtype}" if isinstance(tensor_scale, Tensor) else "missing"
        )
        raise InputError(f"{op}: tensor_scale is {received}; nvfp4 needs one float32, (1,).")
    if tensor_scale.device != tensor.device:
        raise InputError(f"{op}: tensor_scale is on {tensor_scale.device}, the rest on {tensor.device}. Move it there.")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N (columns, K of the docstring), format, optional B, scale, special.  N becomes a multiple of 32."""
    sizes = {**params, "N": -(-params["N"] // 32) * 32}
    return Sample((samples.matrix(sizes, dtype, device, seed),), {"format": params["format"]})


def cost(sample: Sample, direction: str) -> Cost:
    """x is read once, q and the scales are written; a maximum, a product and a rounding an element."""
    (x,), fmt = sample.args, FORMATS[sample.kwargs.get("format", "mxfp4")]
    return Cost(3 * x.numel(), rows.nbytes(x), x.numel() * fmt.bits // 8 + x.numel() // fmt.block)


def _bad(name: str, match: str, *shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> BadInput:
    return BadInput(name, lambda d: Sample((torch.ones(shape, device=d).to(dtype),), options), match)


def _case(name: str, m: int, n: int, format: str, **params: Any) -> Workload:
    return Workload(name, {"M": m, "N": n, "format": format, **params}, directions=("fwd",))


CONTRACT = register(
    Contract(
        name=OP,
        promises=Promises(reference_bits=True),
        family="quant",
        summary="bf16, fp16 or fp32 to MXFP8, MXFP4 or NVFP4",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        batch_dim=None,
        workloads=tuple(_case(f"{f}_{m}x{n}", m, n, f) for f in FORMATS for m, n in ((4096, 4096), (14336, 4096))),
        cpu_workloads=(_case("small", 64, 256, "mxfp4"),),
        edge_cases=(
            *(_case(f"{f}: rows that fill no program", 37, 384, f) for f in FORMATS),
            *(_case(f"{f}_special: NaN and infinity", 5, 320, f, special=True) for f in FORMATS),
            _case("batch: of matrices", 6, 64, "mxfp4", B=3),
            _case("one_block: of a vector", 1, 32, "mxfp4"),
        ),
        bad_inputs=(
            _bad("integers", "x is torch.int32; needs one of", 4, 32, dtype=torch.int32),
            _bad("a vector", r"x is \(32,\)", 32),
            _bad("a cut block", "K is 40; mxfp4 needs a multiple of 32", 4, 40),
            _bad("unknown format", "format is 'fp4'; allowed are 'mxfp4'", 4, 32, format="fp4"),
            _bad(
                "a scale of the tensor", "tensor_scale is given, and mxfp4 has none", 4, 32, tensor_scale=torch.ones(1)
            ),
        ),
    )
)
