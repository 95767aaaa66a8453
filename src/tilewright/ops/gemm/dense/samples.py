"""Random problems, costs and edge cases of `matmul` and `bmm`, which differ in a leading dimension."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Cost, Sample, Workload
from tilewright.ops import rows
from tilewright.ops.gemm.operands import FP8, LAYOUTS, columns_out

_OPTIONS = ("activation", "out_dtype")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N, K, optional B, and layout ("nt"; "nn", "tn", "tt"), bias, c (True for the result's dtype, or one),
    activation, alpha, scale (alpha as a tensor), out_dtype, log_uniform (magnitudes over twelve octaves).

    N counts columns of op(b); an odd one becomes even for "swiglu".  Elements of b are of size 1/sqrt(K), so that
    results are of size 1; float8 holds no such numbers, and there `alpha` is 1/sqrt(K), on the device.
    """
    g = rows.generator(seed)
    m, n, k = params["M"], params["N"], params["K"]
    activation, out_dtype = params.get("activation"), params.get("out_dtype")
    n += n % 2 if activation == "swiglu" else 0
    lead = (params["B"],) if "B" in params else ()
    small = max(k, 1) ** -0.5

    def operand(shape: tuple[int, int], transposed: bool, scale: float) -> Tensor:
        size = (*lead, *(reversed(shape) if transposed else shape))
        values = rows.random_tensor(size, torch.float32 if params.get("log_uniform") else dtype, device, g, scale)
        if params.get("log_uniform"):
            values = (values * torch.exp2(12 * torch.rand(size, generator=g) - 6).to(device)).to(dtype)
        return values.mT if transposed else values

    code = LAYOUTS.index(params.get("layout", "nt"))
    a = operand((m, k), code >= 2, 1.0)
    b = operand((k, n), code in (0, 3), 1.0 if dtype == FP8 else small)
    options = {name: params[name] for name in _OPTIONS if params.get(name) is not None}
    result = out_dtype or (torch.bfloat16 if dtype == FP8 else dtype)
    if params.get("bias"):
        options["bias"] = rows.random_tensor((n,), result, device, g)
    if params.get("c"):
        c_dtype = result if params["c"] is True else params["c"]
        options["c"] = rows.random_tensor((*lead, m, columns_out(n, activation or "")), c_dtype, device, g)
    alpha = params.get("alpha", small if dtype == FP8 else 1.0)
    if dtype == FP8 or params.get("scale"):
        options["alpha"] = torch.full((1,), alpha, dtype=torch.float32, device=device)
    elif alpha != 1.0:
        options["alpha"] = alpha
    return Sample((a, b), options)


def cost(sample: Sample, direction: str) -> Cost:
    """Two operations a product of elements; every operand is read once, the result written once.  The backward is two
    products, which read dz, a and b and write the gradients of a and b.
    """
    a, b = sample.args
    options = sample.kwargs
    n_out = columns_out(b.shape[-1], options.get("activation") or "")
    out_dtype = options.get("out_dtype") or (torch.bfloat16 if a.dtype == FP8 else a.dtype)
    flops = 2 * a.numel() * b.shape[-1]
    written = a.numel() // max(a.shape[-1], 1) * n_out * out_dtype.itemsize
    if direction == "fwd":
        return Cost(flops, rows.nbytes(a, b, options.get("bias"), options.get("c")), written)
    return Cost(2 * flops, rows.nbytes(a, b) + written, rows.nbytes(a, b))


def _case(name: str, m: int, n: int, k: int, **options: Any) -> Workload:
    return Workload(name, {"M": m, "N": n, "K": k, **options})


EDGE_CASES = (
    _case("ragged: a tile and a bit in M, N and K", 70, 200, 136),
    _case("one_row: most of a tile is padding", 1, 64, 96),
    _case("odd_sizes: no row is aligned", 7, 33, 45),
    _case("nn: b is row-major", 20, 72, 56, layout="nn"),
    _case("tn: a is M-major", 20, 72, 56, layout="tn"),
    _case("tt: a is M-major, b is K-major", 24, 72, 56, layout="tt"),
    _case("k_1: an outer product", 9, 40, 1),
    _case("n_1: a matrix times a vector", 33, 1, 64),
    _case("long_k: many steps of the accumulator, few tiles", 5, 48, 2056),
    _case("bias_gelu: an epilogue that ends in tanh", 36, 80, 64, bias=True, activation="gelu"),
    _case("relu: negative zeros and halves", 12, 40, 32, activation="relu"),
    _case("silu: with a bias", 12, 40, 32, bias=True, activation="silu"),
    _case("swiglu: pairs of columns become one", 36, 144, 64, activation="swiglu"),
    _case("swiglu_all: bias, gate and residual", 12, 80, 32, activation="swiglu", bias=True, c=True, alpha=0.5),
    _case("residual: c in the result's dtype", 36, 80, 64, c=True),
    _case("float32: result and c are wider than the operands", 36, 80, 64, c=True, out_dtype=torch.float32),
    _case("bfloat16: the result has another type", 12, 40, 64, c=torch.float32, out_dtype=torch.bfloat16),
    _case("alpha: scaled before the bias", 12, 40, 32, alpha=-0.37, bias=True),
    _case("scale: alpha is on the device", 12, 40, 32, alpha=2.5, scale=True, bias=True),
    _case("log_uniform: magnitudes over twelve octaves", 36, 80, 120, log_uniform=True),
    _case("empty: no rows", 0, 64, 32),
)


def bad_inputs(lead: tuple[int, ...]) -> tuple[BadInput, ...]:
    """Calls that must fail; `lead`: () for `matmul`, a batch for `bmm`."""

    def bad(
        name: str,
        match: str,
        a: tuple[int, ...] = (4, 8),
        b: tuple[int, ...] = (8, 6),
        dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
        **options: Any,
    ) -> BadInput:
        def make(device: torch.device) -> Sample:
            def ones(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
                return torch.ones(shape, device=device).to(dtype)

            kwargs = {k: ones(*v) if isinstance(v, tuple) else v for k, v in options.items()}
            return Sample((ones((*lead, *a), dtypes[0]), ones((*lead, *b), dtypes[1])), kwargs)

        return BadInput(name, make, match)

    half, fp8 = torch.bfloat16, torch.float8_e4m3fn
    return (
        bad("K differs", "agree in K", b=(7, 6)),
        bad("K differs once transposed", "agree in K", trans_b=True),
        bad("two dtypes", "a is torch.float32, b is torch.bfloat16", dtypes=(torch.float32, half)),
        bad("integers", "a is torch.int32; needs one of", dtypes=(torch.int32, torch.int32)),
        bad("unknown activation", "activation is 'tanh'; allowed are None, 'relu'", activation="tanh"),
        bad("odd columns for a gate", "op\\(b\\) has 7; N must be even", b=(8, 7), activation="swiglu"),
        bad("bias too short", r"bias is \(5,\); needs \(6,\)", bias=((5,),)),
        bad("bias of integers", "bias is torch.int32; needs", bias=((6,), torch.int32)),
        bad("c too wide", r"c is .*7\); needs .*6\)", c=((*lead, 4, 7),)),
        bad("c of a gate is full", r"c is .*6\); needs .*3\)", c=((*lead, 4, 6),), activation="swiglu"),
        bad("c of integers", "c is torch.int32; needs", c=((*lead, 4, 6), torch.int32)),
        bad("integer result", "out_dtype is torch.int32; of torch.float32 operands", out_dtype=torch.int32),
        bad("double result of floats", "out_dtype is torch.float64; of", out_dtype=torch.float64),
        bad("float8 result", "out_dtype is torch.float8_e4m3fn; of", dtypes=(fp8, fp8), out_dtype=fp8),
        bad("alpha in words", "alpha is a str; needs a number", alpha="1.0"),
        bad("alpha of two elements", r"alpha is \(2,\) torch.float32", alpha=((2,),)),
        bad("alpha in half precision", r"alpha is \(1,\) torch.bfloat16", alpha=((1,), half)),
    )
