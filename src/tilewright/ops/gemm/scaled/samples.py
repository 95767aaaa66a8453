"""Random problems, costs and edge cases of `scaled_matmul` and `scaled_matmul_fp8`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Cost, Sample, Workload
from tilewright.ops import rows
from tilewright.ops.gemm.operands import FP8, LAYOUTS, columns_out
from tilewright.ops.quant.layout import BLOCK, ROW, TENSOR, TOKEN, ScaleLayout

OCTAVES = 6
"""The range of the scales of a benchmark."""
_SCALINGS: Mapping[str, tuple[ScaleLayout, ScaleLayout]] = {
    "tensor": (TENSOR, TENSOR),
    "row": (ROW, ROW),
    "token_block": (TOKEN, BLOCK),
    "token_token": (TOKEN, TOKEN),
    "row_tensor": (ROW, TENSOR),
}


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N, K, and scaling ("token_block"; "tensor", "row", "token_token", ...), layout ("nt"; "nn", "tn",
    "tt"), bias, c, activation, alpha, out_dtype, binary.

    dtype: of the result where params name none; float8 stands for the default.  Scales are log-uniform, so that the one
    of a neighbour is wrong; `binary` ones are powers of two times a number that all share, and lie over few octaves:
    such operands can be scaled by one number each and mean the same, which lets cuBLAS compete in that easier problem.
    """
    g = rows.generator(seed)
    m, n, k = params["M"], params["N"], params["K"]
    activation = params.get("activation")
    n += n % 2 if activation == "swiglu" else 0
    code = LAYOUTS.index(params.get("layout", "nt"))
    layout_a, layout_b = _SCALINGS[params.get("scaling", "token_block")]
    size = max(k, 1) ** -0.5

    def operand(shape: tuple[int, int], k_major: bool) -> Tensor:
        values = rows.random_tensor(shape if k_major else shape[::-1], FP8, device, g)
        return values if k_major else values.mT

    def scales(layout: ScaleLayout, shape: tuple[int, int], unit: float) -> Tensor:
        uniform = torch.rand(layout.shape(*shape), generator=g)
        exponents = torch.floor(uniform * (OCTAVES + 1)) - OCTAVES if params.get("binary") else 4 * uniform - 2
        return layout.empty(*shape, device).copy_(unit * torch.exp2(exponents))

    a, b = operand((m, k), code < 2), operand((n, k), code in (0, 3)).mT
    scale_a, scale_b = scales(layout_a, (m, k), 1.25), scales(layout_b, (n, k), size).mT
    options = {"alpha": params["alpha"]} if "alpha" in params else {}
    if activation is not None:
        options["activation"] = activation
    result = params.get("out_dtype") or (torch.bfloat16 if dtype == FP8 else dtype)
    if result != torch.bfloat16:
        options["out_dtype"] = result
    if params.get("bias"):
        options["bias"] = rows.random_tensor((n,), result, device, g)
    if params.get("c"):
        c_dtype = result if params["c"] is True else params["c"]
        options["c"] = rows.random_tensor((m, columns_out(n, activation or "")), c_dtype, device, g)
    return Sample((a, b, scale_a, scale_b), options)


def quantising_inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """Returns `inputs` for results of float8."""
    return inputs(params, FP8, device, seed)


def cost(sample: Sample, direction: str) -> Cost:
    """Two operations a product of elements; operands, scales and addends read once, the result written once."""
    out_dtype = sample.kwargs.get("out_dtype") or torch.bfloat16
    m, n_out = _result(sample)
    return _cost(sample, m * n_out * out_dtype.itemsize)


def quantising_cost(sample: Sample, direction: str) -> Cost:
    """Counts as `cost` does; the result is a byte an element and the scales."""
    m, n_out = _result(sample)
    return _cost(sample, m * n_out + 4 * m * -(-n_out // 128))


def _result(sample: Sample) -> tuple[int, int]:
    a, b, *_ = sample.args
    return a.shape[0], columns_out(b.shape[1], sample.kwargs.get("activation") or "")


def _cost(sample: Sample, written: int) -> Cost:
    a, b, *_ = sample.args
    addends = sample.kwargs.get("bias"), sample.kwargs.get("c")
    return Cost(2 * a.numel() * b.shape[1], rows.nbytes(*sample.args, *addends), written)


def _case(name: str, m: int, n: int, k: int, **options: Any) -> Workload:
    return Workload(name, {"M": m, "N": n, "K": k, **options})


_CASES = (
    _case("ragged: a tile, a block and a bit in M, N and K", 70, 200, 328),
    _case("one_row: most of a tile is padding", 1, 64, 192),
    _case("odd_sizes: nothing is aligned, nor are the scales", 7, 33, 145),
    _case("tensor: one scale each", 36, 80, 272, scaling="tensor"),
    _case("row: one scale a row and a column", 36, 80, 272, scaling="row"),
    _case("token_token: 1x128 of both", 36, 144, 272, scaling="token_token"),
    _case("within_a_block: K, N and M below 128", 20, 72, 56),
    _case("nn: b is copied", 20, 72, 160, layout="nn"),
    _case("tt: a is copied", 24, 72, 160, layout="tt"),
    _case("long_k: many blocks, few tiles", 5, 48, 2056),
    _case("k_1: an outer product", 9, 40, 1),
    _case("n_1: a matrix times a vector", 33, 1, 192),
    _case("bias_gelu: an epilogue that ends in tanh", 36, 80, 144, bias=True, activation="gelu"),
    _case("silu: with a bias", 12, 40, 160, bias=True, activation="silu", scaling="row"),
    _case("swiglu: pairs of columns become one", 36, 288, 144, activation="swiglu"),
    _case("alpha: scaled before the bias", 12, 40, 160, alpha=-0.37, bias=True),
    _case("empty: no rows", 0, 64, 160),
)
EDGE_CASES = (
    *_CASES,
    _case("swiglu_all: bias, gate and residual", 12, 80, 160, activation="swiglu", bias=True, c=True, alpha=0.5),
    _case("residual: c in the result's dtype", 36, 80, 144, c=True),
    _case(
        "accumulate: a weight gradient in float32", 36, 80, 272, c=True, out_dtype=torch.float32, scaling="token_token"
    ),
    _case("bfloat16: the result has another type than c", 12, 40, 160, c=torch.float32, out_dtype=torch.bfloat16),
)
QUANTISING_CASES = (
    *_CASES,
    _case("two_groups: scales of 128 and of what is left", 36, 136, 272, scaling="tensor"),
    _case("relu_swiglu: groups of one row lie in two tiles", 12, 512, 160, activation="swiglu", bias=True),
)


def ones(
    device: torch.device,
    a: tuple[int, ...] = (4, 256),
    b: tuple[int, ...] = (256, 6),
    scale_a: tuple[int, ...] = (4, 2),
    scale_b: tuple[int, ...] = (2, 1),
) -> tuple[Tensor, ...]:
    """Operands and scales of these shapes, all ones: 1x128 times 128x128."""
    tensors = [torch.ones(shape, device=device) for shape in (a, b, scale_a, scale_b)]
    return tensors[0].to(FP8), tensors[1].to(FP8), tensors[2], tensors[3]


def bad(name: str, match: str, **changed: Any) -> BadInput:
    """A call that must fail: `ones` with what is `changed` (a shape, (shape, dtype) or a value), and options."""

    def make(device: torch.device) -> Sample:
        names = ("a", "b", "scale_a", "scale_b")
        args = list(ones(device, **{k: v for k, v in changed.items() if k in names and type(v[0]) is int}))
        for i, key in enumerate(names):
            if key in changed and type(changed[key][0]) is not int:
                args[i] = _tensor(changed[key], device)
        options = {k: _tensor(v, device) if isinstance(v, tuple) else v for k, v in changed.items() if k not in names}
        return Sample(tuple(args), options)

    return BadInput(name, make, match)


def _tensor(spec: Any, device: torch.device) -> Tensor:
    shape, *dtype = spec
    return torch.ones(shape, device=device).to(*(dtype or (torch.float32,)))


def bad_inputs() -> tuple[BadInput, ...]:
    """Returns calls that both ops refuse."""
    half = torch.bfloat16
    return (
        bad("K differs", "agree in K", b=(128, 6)),
        bad("K differs once transposed", "agree in K", trans_b=True),
        bad("bf16 operand", "a is torch.bfloat16; needs float8_e4m3fn", a=((4, 256), half)),
        bad("vector", "b is .256,.; needs matrices", b=((256,), FP8)),
        bad("batch of b", r"needs \(M, K\) and \(K, N\)", b=(2, 256, 6)),
        bad("scales of another K", r"scale_a is \(4, 3\); for a \(M, K\) = \(4, 256\) it may be", scale_a=(4, 3)),
        bad("scales of b as of its transpose", r"scale_b is \(2, 1\); for op\(b\).mT", scale_b=(1, 2)),
        bad("scales of a block of columns", "may be .1, 1. .one for all.*1x128.*128x128", scale_b=(2, 2)),
        bad("scale without dimensions", r"scale_a is \(\); for", scale_a=((), torch.float32)),
        bad("scales in half precision", "scale_b is torch.bfloat16; needs float32", scale_b=((2, 1), half)),
        bad("packed scales", "packed powers of two as Blackwell's", scale_a=((4, 1), torch.int32)),
        bad("unknown activation", "activation is 'tanh'; allowed are None, 'relu'", activation="tanh"),
        bad("odd columns for a gate", "op.b. has 7; N must be even", b=(256, 7), activation="swiglu"),
        bad("bias too short", r"bias is \(5,\); needs \(6,\)", bias=((5,),)),
        bad("bias of integers", "bias is torch.int32; needs", bias=((6,), torch.int32)),
        bad("alpha in words", "alpha is a str; needs a number", alpha="1.0"),
        bad("alpha in a tensor", "alpha is a Tensor; needs a number", alpha=((1,),)),
    )
