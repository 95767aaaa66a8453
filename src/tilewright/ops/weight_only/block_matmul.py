"""Activations of 16 bits times weights in MXFP4, NVFP4 and MXFP8."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.errors import InputError
from tilewright.ops.gemm.operands import copyable
from tilewright.ops.quant import microscale
from tilewright.ops.quant.dequantize_blocks import check_blocks, depth_of, stored
from tilewright.ops.quant.microscale import E4M3, FORMATS, UINT8
from tilewright.ops.rows import generator, nbytes, random_tensor
from tilewright.ops.weight_only.checks import check_dtype

OP = "block_matmul"


class BlockMatmulArgs(NamedTuple):
    x: Tensor  # (M, K), contiguous along K
    q: Tensor  # (N, K) or (N, K / 2), contiguous
    scales: Tensor  # (N, K / block), contiguous
    tensor_scale: Tensor | None  # (1,) float32, of nvfp4
    bias: Tensor | None  # (N,)
    out_dtype: torch.dtype


class BlockMatmulBucket(NamedTuple):
    M: int  # rounded up to a power of two
    N: int
    K: int
    block: int
    bits: int
    out_bits: int
    aligned: int  # whether rows of x, and q, begin at multiples of 16 bytes


@dispatch(OP)
def block_matmul(
    x: Tensor,
    q: Tensor,
    scales: Tensor,
    tensor_scale: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = x @ w.T + bias with w in mxfp4, nvfp4 or mxfp8, as `cast_to_blocks` makes it.

    x: (..., M, K) bf16; fp16 and fp32 run in torch alone.   q: (N, K / 2) uint8 or (N, K) float8_e4m3fn,
    scales: (N, K / block), tensor_scale: (1,) fp32 of nvfp4; their dtypes name the format, as in `dequantize_blocks`.
    bias: (N,) bf16|fp16|fp32.   out_dtype: bf16|fp16|fp32, by default x's.   Returns (..., M, N).

    Rounding: an element times the scale of its block is exact in bfloat16; products and sums are float32; the sum times
    tensor_scale, then bias, and one rounding to out_dtype.  "triton" makes the weight in bfloat16 first and leaves the
    product to torch.

    backend: run on exactly this backend ("cuda", "triton", "torch") or raise BackendError.   "cuda" is for Hopper, at
    most 16 rows and K a multiple of 128.   For inference: no backend has a kernel of a gradient.
    Raises InputError for shapes that do not fit and every option outside of the above.
    """
    if not isinstance(x, Tensor) or x.dim() < 2:
        received = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise InputError(f"{OP}: x is {received}; needs a tensor (..., M, K).")
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    q, scales = stored(q, scales)
    bias = bias.contiguous() if isinstance(bias, Tensor) else bias
    result: Tensor = call(CONTRACT, BlockMatmulArgs(rows, q, scales, tensor_scale, bias, out_dtype or x.dtype), backend)
    return result if x.dim() == 2 else result.view(*x.shape[:-1], result.shape[-1])


def reference(
    x: Tensor,
    q: Tensor,
    scales: Tensor,
    tensor_scale: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same in plain torch; on float64 the result is float64, whatever `out_dtype` says."""
    q, scales = stored(q, scales)
    args = BlockMatmulArgs(x.flatten(0, -2), q, scales, tensor_scale, bias, out_dtype or x.dtype)
    return product(args).reshape(*x.shape[:-1], q.shape[0])


def product(args: BlockMatmulArgs) -> Tensor:
    """Returns x @ w.T + bias of rows x (M, K), with weight and accumulation in float32."""
    sum_dtype = torch.float64 if args.x.dtype == torch.float64 else torch.float32
    y = args.x.to(sum_dtype) @ microscale.restore(args.q, args.scales, None).to(sum_dtype).T
    if args.tensor_scale is not None:
        y = y * args.tensor_scale.to(sum_dtype)
    if args.bias is not None:
        y = y + args.bias.to(sum_dtype)
    return y.to(torch.float64 if sum_dtype == torch.float64 else args.out_dtype)


def _bucket(args: BlockMatmulArgs) -> BlockMatmulBucket:
    fmt = microscale.format_of(args.q, args.scales)
    assert fmt is not None, "checked"
    m, n, k = row_bucket(args.x.shape[0]), hint(args.q.shape[0]), hint(args.x.shape[1])
    aligned = copyable(args.x) and copyable(args.q)
    return BlockMatmulBucket(m, n, k, fmt.block, fmt.bits, 8 * args.out_dtype.itemsize, int(aligned))


FORWARD = RawOp(
    OP,
    "fwd",
    BlockMatmulArgs,
    package="tilewright.ops.weight_only",
    kernels=("sm90.block_matmul", "triton.block_matmul"),
    outputs=lambda args: (((args.x.shape[0], args.q.shape[0]), args.out_dtype),),
    reference=product,
    bucket=_bucket,
    bucket_names=BlockMatmulBucket._fields,
    dtypes=(torch.bfloat16,),
)


def check(args: BlockMatmulArgs) -> None:
    """Raise InputError for what the docstring of `block_matmul` excludes."""
    x, q, scales, tensor_scale, bias, out_dtype = args
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise InputError(f"{OP}: x is {x.dtype}; needs bfloat16 (float16 and float32 run in torch alone).")
    if tensor_scale is not None and tensor_scale.dtype == torch.float64:  # the oracle's
        tensor_scale = tensor_scale.to(torch.float32)
    check_blocks(OP, q, scales, tensor_scale)
    if q.dim() != 2 or x.shape[1] != depth_of(q):
        raise InputError(f"{OP}: x is {tuple(x.shape)}, q {tuple(q.shape)} of K={depth_of(q)}; they must agree in K.")
    if x.device != q.device:
        raise InputError(f"{OP}: x is on {x.device}, q on {q.device}. Move them to one device.")
    if x.dtype != torch.float64:
        check_dtype(OP, "out_dtype", out_dtype)
    if bias is not None and (
        tuple(bias.shape) != (q.shape[0],) or not bias.is_floating_point() or bias.device != x.device
    ):
        raise InputError(
            f"{OP}: bias is {tuple(bias.shape)} {bias.dtype} on {bias.device}; needs ({q.shape[0]},) of floating point "
            f"on {x.device}."
        )


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N, K, format, optional bias, out_dtype, high (scales up to the largest).  Results are of size 1.

    K is rounded up to a multiple of 32.
    """
    g = generator(seed)
    m, n, k, fmt = params["M"], params["N"], -(-params["K"] // 32) * 32, FORMATS[params["format"]]
    w = random_tensor((n, k), torch.float32, device, g, max(k, 1) ** -0.5)
    w *= torch.exp2(4 * torch.rand((n, 1), generator=g) - 2).to(device)
    tensor_scale = microscale.tensor_scale_of(w) if fmt.name == "nvfp4" else None
    q, scales = microscale.quantise(w, fmt, tensor_scale)
    options = {name: params[name] for name in ("out_dtype",) if name in params}
    if params.get("bias"):
        options["bias"] = random_tensor((n,), dtype, device, g)
    if params.get("high"):
        scales += 30
    return Sample((random_tensor((m, k), dtype, device, g), q, scales, tensor_scale), options)


def cost(sample: Sample, direction: str) -> Cost:
    """Two operations a product of elements; every operand read once, as stored, the result written once."""
    x, q, scales, _ = sample.args
    m, n = x.numel() // max(x.shape[-1], 1), q.shape[0]
    out_dtype = sample.kwargs.get("out_dtype") or x.dtype
    return Cost(2 * m * n * depth_of(q), nbytes(x, q, scales, sample.kwargs.get("bias")), m * n * out_dtype.itemsize)


def _case(name: str, m: int, n: int, k: int, format: str, **options: Any) -> Workload:
    return Workload(name, {"M": m, "N": n, "K": k, "format": format, **options}, directions=("fwd",))


def _bad(name: str, match: str, x: Tensor, q: Tensor, scales: Tensor, **options: Any) -> BadInput:
    return BadInput(name, lambda d: Sample((x.to(d), q.to(d), scales.to(d)), options), match)


_X, _Q, _S = torch.ones(4, 64), torch.ones(6, 32, dtype=UINT8), torch.full((6, 2), 127, dtype=UINT8)

CONTRACT = register(
    Contract(
        name=OP,
        family="weight_only",
        summary="rows of 16 bits times weights in MXFP4, NVFP4 or MXFP8",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        dtypes=(torch.bfloat16,),
        workloads=tuple(
            _case(f"{f}_{n}x{k}_m{m}", m, n, k, f)
            for f in FORMATS
            for n, k in ((4096, 4096), (14336, 4096), (4096, 14336))
            for m in (1, 4, 16, 64, 4096)
        ),
        cpu_workloads=(_case("small", 4, 256, 512, "mxfp4"),),
        edge_cases=(
            *(_case(f"{f}: one row", 1, 64, 256, f) for f in FORMATS),
            *(_case(f"{f}_ragged: a tile and a bit in M and N", 11, 200, 640, f, bias=True) for f in FORMATS),
            *(_case(f"{f}_rows: more than the kernel takes", 19, 72, 160, f) for f in FORMATS),
            _case("n_1: a single channel", 9, 1, 384, "mxfp4"),
            _case("long_k: many chunks a warp", 16, 48, 8192, "nvfp4"),
            _case("high: scales beyond those of one power of two", 3, 40, 256, "mxfp4", high=True),
            _case("float32: the result is wider than x", 8, 80, 384, "mxfp4", out_dtype=torch.float32),
            _case("empty: no rows", 0, 64, 128, "mxfp4"),
        ),
        bad_inputs=(
            _bad("a vector", r"x is \(64,\) torch.float32; needs a tensor", _X[0], _Q, _S),
            _bad("K differs", "agree in K", _X[:, :32], _Q, _S),
            _bad("scales of integers", "q is torch.uint8 and scales are torch.float32", _X, _Q, _S.float()),
            _bad("e4m3 without its tensor's scale", "tensor_scale is missing", _X, _Q, torch.ones(6, 4).to(E4M3)),
            _bad("bias too long", r"bias is \(7,\)", _X, _Q, _S, bias=torch.ones(7)),
            _bad("a double", "out_dtype is torch.float64", _X, _Q, _S, out_dtype=torch.float64),
        ),
    )
)
