"""Activations of 16 bits times weights of 8 or 4."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.errors import InputError
from tilewright.ops.gemm.dense.checks import check_epilogue
from tilewright.ops.gemm.operands import ACTIVATIONS, apply_epilogue, columns_out, copyable, fold, folded_out
from tilewright.ops.rows import generator, nbytes, random_tensor
from tilewright.ops.weight_only import packing
from tilewright.ops.weight_only.block_matmul import block_matmul
from tilewright.ops.weight_only.block_matmul import reference as block_matmul_reference
from tilewright.ops.weight_only.checks import check_dtype, check_weight
from tilewright.ops.weight_only.samples import random_weight


class WeightOnlyMatmulArgs(NamedTuple):
    x: Tensor  # (M, K), contiguous along K
    q: Tensor  # (N, K) or (N, K / 2), contiguous
    scales: Tensor  # (N, groups)
    bias: Tensor | None  # (N,)
    activation: str  # one of ACTIVATIONS
    out_dtype: torch.dtype


class WeightOnlyMatmulBucket(NamedTuple):
    M: int  # rounded up to a power of two
    N: int
    K: int
    bits: int
    aligned: int  # TMA can read x, q and the scales in place
    out_bits: int
    gated: int  # the activation halves the columns


@dispatch("weight_only_matmul")
def weight_only_matmul(
    x: Tensor,
    q: Tensor,
    scales: Tensor,
    *,
    tensor_scale: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = act(x @ w.T + bias) with w = q * scales (W8A16, W4A16).  Made for at most 64 rows, right for any number.

    x: (..., M, K) bf16|fp16; fp32 runs in torch alone.   q: (N, K) int8, or (N, K / 2) uint8 of 4 bits, and
    scales: (N, ceil(K / 128)) bf16|fp16|fp32, as `quantize_weight` makes them.   Returns (..., M, N_out).
    bias: (N,) bf16|fp16|fp32.   activation: None, "relu", "gelu" (by tanh), "silu", or "swiglu", for which rows of the
    weight are pairs (gate_0, up_0, gate_1, up_1, ...) and N_out = N / 2.   out_dtype: bf16|fp16|fp32, by default x's.

    Scales of uint8, float8_e8m0fnu or float8_e4m3fn are those of mxfp4, mxfp8 and nvfp4, the last with tensor_scale:
    then this is `block_matmul`, which has neither activation nor out.

    Rounding: an integer is exact in x's dtype, and its product with x in float32.  The products of a group of 128 are
    added in float32, their sum is multiplied by the group's scale and added to those of the other groups, in float32;
    then bias and activation, and one rounding to out_dtype.  Weights themselves are never rounded.

    out: contiguous tensor to write instead of allocating.   backend: run on exactly this backend ("cuda", "triton",
    "torch") or raise BackendError.   "cuda" is for Hopper and scales as `quantize_weight` lays them.
    For inference: no backend has a kernel of a gradient.  Where x or bias needs one the reference runs, which makes the
    weight in float32.   Raises InputError for shapes that do not fit and every option outside of the above.
    """
    if isinstance(scales, Tensor) and scales.dtype.itemsize == 1 and scales.dtype != torch.int8:
        if activation is not None or out is not None:
            raise InputError(
                f"weight_only_matmul: scales are {scales.dtype}, and products of these formats have no activation and "
                "no out. Apply the activation to the result."
            )
        blocks: Tensor = block_matmul(x, q, scales, tensor_scale, bias=bias, out_dtype=out_dtype, backend=backend)
        return blocks
    if tensor_scale is not None:
        raise InputError("weight_only_matmul: tensor_scale is given, and integers have none; it is for nvfp4.")
    if not isinstance(x, Tensor) or x.dim() < 2:
        raise InputError(f"weight_only_matmul: x is {_told(x)}; needs a tensor (..., M, K).")
    rows = x.shape[:-1]
    args = arguments(fold("weight_only_matmul", "x", x, rows), q, scales, bias, activation, out_dtype)
    if out is not None:
        if x.dim() > 2:  # what is wrong with the operands comes before what is wrong with folding `out`
            with torch.no_grad():
                CONTRACT.check(*args)
            call(CONTRACT, args, backend, folded_out("weight_only_matmul", out, rows))
            return out
        result: Tensor = call(CONTRACT, args, backend, out)
        return result
    result = call(CONTRACT, args, backend)
    return result if x.dim() == 2 else result.view(*rows, result.shape[-1])


def arguments(
    x: Tensor, q: Tensor, scales: Tensor, bias: Tensor | None, activation: str | None, out_dtype: torch.dtype | None
) -> WeightOnlyMatmulArgs:
    """Returns the arguments of the raw op: rows of x and q contiguous."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    q = q.contiguous() if isinstance(q, Tensor) else q
    bias = bias.contiguous() if isinstance(bias, Tensor) else bias
    return WeightOnlyMatmulArgs(x, q, scales, bias, activation or "", out_dtype or x.dtype)


def reference(
    x: Tensor,
    q: Tensor,
    scales: Tensor,
    *,
    tensor_scale: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same in plain torch; on float64 the result is float64, whatever `out_dtype` says."""
    if tensor_scale is not None or scales.dtype.itemsize == 1:
        return block_matmul_reference(x, q, scales, tensor_scale, bias=bias, out_dtype=out_dtype)
    result = product(WeightOnlyMatmulArgs(x.flatten(0, -2), q, scales, bias, activation or "", out_dtype or x.dtype))
    return result.reshape(*x.shape[:-1], result.shape[-1])


def product(args: WeightOnlyMatmulArgs) -> Tensor:
    """Returns act(x @ w.T + bias) of rows x (M, K), with weight and accumulation in float32."""
    acc_dtype = torch.float64 if args.x.dtype == torch.float64 else torch.float32
    z = args.x.to(acc_dtype) @ packing.restore(args.q, args.scales).to(acc_dtype).T
    out_dtype = torch.float64 if acc_dtype == torch.float64 else args.out_dtype
    return apply_epilogue(z, args.bias, None, args.activation, out_dtype)


def bucket_of(args: WeightOnlyMatmulArgs) -> WeightOnlyMatmulBucket:
    """Returns the sizes and properties that a config is chosen by."""
    x, q, scales = args.x, args.q, args.scales
    aligned = copyable(x) and copyable(q) and copyable(scales) and packing.in_layout(scales)
    return WeightOnlyMatmulBucket(
        M=row_bucket(x.shape[0]),
        N=hint(q.shape[0]),
        K=hint(x.shape[1]),
        bits=packing.bits_of(q),
        aligned=int(aligned),
        out_bits=8 * args.out_dtype.itemsize,
        gated=int(args.activation == "swiglu"),
    )


FORWARD = RawOp(
    "weight_only_matmul",
    "fwd",
    WeightOnlyMatmulArgs,
    package="tilewright.ops.weight_only",
    kernels=("sm90.weight_only_matmul", "sm90.few_rows_int4", "triton.weight_only_matmul"),
    outputs=lambda args: (((args.x.shape[0], columns_out(args.q.shape[0], args.activation)), args.out_dtype),),
    reference=product,
    bucket=bucket_of,
    bucket_names=WeightOnlyMatmulBucket._fields,
    dtypes=(torch.bfloat16, torch.float16),
    out=True,
)


def check(args: WeightOnlyMatmulArgs) -> None:
    """Raise InputError for what the docstring of `weight_only_matmul` excludes."""
    op = "weight_only_matmul"
    x, q, scales, bias, activation, out_dtype = args
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64) or x.dim() != 2:
        raise InputError(f"{op}: x is {_told(x)}; needs (M, K) of bfloat16 or float16 (float32 runs in torch alone).")
    check_weight(op, q, scales)
    depth = packing.depth_of(q)
    if x.shape[1] != depth:
        raise InputError(
            f"{op}: x is {tuple(x.shape)}, q {tuple(q.shape)} holds K={depth} elements of {packing.bits_of(q)} bits a "
            "row; they must agree in K."
        )
    if x.device != q.device:
        raise InputError(f"{op}: x is on {x.device}, q on {q.device}. Move them to one device.")
    if activation not in ACTIVATIONS:
        raise InputError(
            f"{op}: activation is {activation!r}; allowed are None, {', '.join(map(repr, ACTIVATIONS[1:]))}."
        )
    if x.dtype != torch.float64:
        check_dtype(op, "out_dtype", out_dtype)
    check_epilogue(op, (x.shape[0], q.shape[0]), x, bias, None, activation)


def _told(x: Any) -> str:
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N, K, optional bits (8, or 4), bias, activation, out_dtype, scale_dtype (that of x by default).

    Results are of size 1; an odd K becomes even at 4 bits, an odd N for "swiglu".
    """
    g = generator(seed)
    m, n, k, bits = params["M"], params["N"], params["K"], params.get("bits", 8)
    k += k % 2 if bits == 4 else 0
    n += n % 2 if params.get("activation") == "swiglu" else 0
    x = random_tensor((m, k), dtype, device, g)
    scale_dtype = params.get("scale_dtype", dtype)
    q, scales = random_weight(n, k, bits, scale_dtype, device, g)
    options = {name: params[name] for name in ("activation", "out_dtype") if name in params}
    if params.get("bias"):
        options["bias"] = random_tensor((n,), dtype, device, g)
    return Sample((x, q, scales), options)


def cost(sample: Sample, direction: str) -> Cost:
    """Two operations a product of elements; every operand read once, as stored, the result written once."""
    x, q, scales = sample.args
    m, n = x.numel() // max(x.shape[-1], 1), q.shape[0]
    n_out = columns_out(n, sample.kwargs.get("activation") or "")
    out_dtype = sample.kwargs.get("out_dtype") or x.dtype
    flops = 2 * m * n * packing.depth_of(q)
    return Cost(flops, nbytes(x, q, scales, sample.kwargs.get("bias")), m * n_out * out_dtype.itemsize)


_LAYERS = {
    "llama8b_qkv": (6144, 4096),
    "llama8b_o": (4096, 4096),
    "llama8b_gate_up": (28672, 4096),
    "llama8b_down": (4096, 14336),
    "dsv3_2112x7168": (2112, 7168),
    "dsv3_7168x16384": (7168, 16384),
}


def _row(name: str, m: int, n: int, k: int, bits: int, **options: Any) -> Workload:
    return Workload(name, {"M": m, "N": n, "K": k, "bits": bits, **options}, directions=("fwd",))


WORKLOADS = (
    *(
        _row(f"{name}_int{bits}_m{m}", m, n, k, bits)
        for name, (n, k) in _LAYERS.items()
        for bits in (8, 4)
        for m in (1, 8, 16, 64)
    ),
    *(_row(f"llama8b_gate_up_swiglu_int{bits}_m1", 1, 28672, 4096, bits, activation="swiglu") for bits in (8, 4)),
)
CPU_WORKLOADS = (_row("small", 4, 256, 512, 8),)


def _case(name: str, m: int, n: int, k: int, **options: Any) -> Workload:
    return Workload(name, {"M": m, "N": n, "K": k, **options}, directions=("fwd",))


_WIDE = {"out_dtype": torch.float32, "scale_dtype": torch.float32}
EDGE_CASES = (
    _case("ragged: a tile and a bit in M, N and K", 19, 200, 272),
    _case("ragged_int4: a tile and a bit in M, N and K", 19, 200, 288, bits=4),
    _case("one_row: most of a tile is padding", 1, 64, 256),
    _case("one_row_int4: most of a tile is padding", 1, 64, 256, bits=4),
    _case("odd_sizes: no row is aligned", 7, 33, 45),
    _case("odd_sizes_int4: no row is aligned", 7, 33, 46, bits=4),
    _case("short_group: less than one", 5, 48, 16),
    _case("n_1: a single channel", 9, 1, 384),
    _case("long_k: many groups, few tiles", 3, 48, 4096),
    _case("long_k_int4: many groups, few tiles", 3, 48, 4096, bits=4),
    _case("many_rows: more than the kernel is made for", 70, 72, 256, bits=4),
    _case(
        "float32: result and scales are wider than x", 8, 80, 384, out_dtype=torch.float32, scale_dtype=torch.float32
    ),
    _case("float32_int4: result and scales", 8, 80, 384, bits=4, out_dtype=torch.float32, scale_dtype=torch.float32),
    _case("gelu: an epilogue that ends in tanh", 12, 80, 128, bias=True, activation="gelu"),
    _case("relu: of sums without a bias", 12, 40, 128, activation="relu", bits=4),
    _case("silu: with a bias", 12, 40, 128, bias=True, activation="silu"),
    _case("swiglu: pairs of channels become one", 12, 144, 256, bias=True, activation="swiglu", bits=4),
    _case("empty: no rows", 0, 64, 128),
)


def _ones(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, device=device).to(dtype)


def _bad(
    name: str,
    match: str,
    x: tuple[int, ...] = (4, 200),
    q: tuple[int, ...] = (6, 200),
    scales: tuple[int, ...] = (6, 2),
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.int8, torch.float32),
    **options: Any,
) -> BadInput:
    def make(device: torch.device) -> Sample:
        kwargs = {key: _ones(device, *value) if isinstance(value, tuple) else value for key, value in options.items()}
        args = [_ones(device, *size, dtype=dtype) for size, dtype in zip((x, q, scales), dtypes, strict=True)]
        return Sample(tuple(args), kwargs)

    return BadInput(name, make, match)


BAD_INPUTS = (
    _bad("a vector", r"x is \(200,\) torch.float32; needs a tensor \(..., M, K\)", x=(200,)),
    _bad("integers times integers", "x is .*int32; needs", dtypes=(torch.int32, torch.int8, torch.float32)),
    _bad("float weights", "q is torch.float32; needs int8", dtypes=(torch.float32, torch.float32, torch.float32)),
    _bad("weights of 4 bits, one a byte", "K=400", scales=(6, 4), dtypes=(torch.float32, torch.uint8, torch.float32)),
    _bad("K differs", "agree in K", x=(4, 199)),
    _bad("one scale a row", r"scales is \(6, 1\); needs \(6, 2\)", scales=(6, 1)),
    _bad("scales transposed", r"scales is \(2, 6\); needs \(6, 2\)", scales=(2, 6)),
    _bad("integer scales", "scales is torch.int32", dtypes=(torch.float32, torch.int8, torch.int32)),
    _bad("unknown activation", "activation is 'tanh'; allowed", activation="tanh"),
    _bad("odd channels for a gate", "N must be even", q=(7, 200), scales=(7, 2), activation="swiglu"),
    _bad("bias too long", r"bias is \(7,\); needs \(6,\)", bias=(7,)),
    _bad("a double", "out_dtype is torch.float64", out_dtype=torch.float64),
)


CONTRACT = register(
    Contract(
        name="weight_only_matmul",
        family="weight_only",
        summary="few rows of 16 bits times weights of 8 or 4",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        dtypes=(torch.bfloat16, torch.float16),
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=EDGE_CASES,
        bad_inputs=BAD_INPUTS,
    )
)
