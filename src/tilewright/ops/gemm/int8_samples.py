"""Random problems, costs, workloads, edge cases and bad inputs of `int8_matmul`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Cost, Sample, Workload
from tilewright.ops import rows
from tilewright.ops.gemm.operands import columns_out
from tilewright.ops.gemm.scaled.workloads import LLAMA_8B

_SMALL = 1 << 22
"""Elements that are drawn on the CPU, so that every device gets the same; more are drawn on their device."""


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, N, K, optional bias, activation, out_dtype.  Operands take every value; results are of about size 1.

    dtype: of the result where params name none; int8 stands for the default.  An odd N becomes even for "swiglu".
    """
    g = rows.generator(seed)
    m, n, k, activation = params["M"], params["N"], params["K"], params.get("activation")
    n += n % 2 if activation == "swiglu" else 0
    unit = 12**0.5 / 256 * max(k, 1) ** -0.25  # a uniform integer of 8 bits has the deviation 256 / sqrt(12)

    def operand(count: int) -> tuple[Tensor, Tensor]:
        octaves = torch.exp2(4 * torch.rand((count, 1), generator=g) - 2)
        return _integers((count, k), device, g), (unit * octaves).to(device)

    (a, scale_a), (b, scale_b) = operand(m), operand(n)
    result = params.get("out_dtype") or (torch.bfloat16 if dtype == torch.int8 else dtype)
    options = {} if result == torch.bfloat16 else {"out_dtype": result}
    if activation is not None:
        options["activation"] = activation
    if params.get("bias"):
        options["bias"] = rows.random_tensor((n,), result, device, g)
    return Sample((a, b, scale_a, scale_b), options)


def _integers(shape: tuple[int, int], device: torch.device, generator: torch.Generator) -> Tensor:
    if shape[0] * shape[1] > _SMALL and device.type == "cuda":
        seed = int(torch.randint(2**31, (), generator=generator))
        generator = torch.Generator(device).manual_seed(seed)
    drawn = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator, device=generator.device)
    return drawn.to(device)


def cost(sample: Sample, direction: str) -> Cost:
    """Two operations a product of elements; operands, scales and bias are read once, the result is written once."""
    a, b, *_ = sample.args
    n_out = columns_out(b.shape[0], sample.kwargs.get("activation") or "")
    written = a.shape[0] * n_out * (sample.kwargs.get("out_dtype") or torch.bfloat16).itemsize
    return Cost(2 * a.numel() * b.shape[0], rows.nbytes(*sample.args, sample.kwargs.get("bias")), written)


def _row(name: str, m: int, n: int, k: int, **options: Any) -> Workload:
    return Workload(name, {"M": m, "N": n, "K": k, **options}, (torch.int8,), ("fwd",))


ROWS = (1, 16, 64, 512, 4096)
WORKLOADS = (
    *(_row(f"llama8b_{name}_m{m}", m, n, k) for name, (n, k) in LLAMA_8B.items() for m in ROWS),
    *(_row(f"llama8b_gate_up_swiglu_m{m}", m, *LLAMA_8B["gate_up"], activation="swiglu") for m in (16, 4096)),
    _row("llama8b_qkv_bias_m64", 64, *LLAMA_8B["qkv"], bias=True),
)
CPU_WORKLOADS = (_row("small", 16, 512, 512),)


def _case(name: str, m: int, n: int, k: int, **options: Any) -> Workload:
    return Workload(name, {"M": m, "N": n, "K": k, **options}, directions=("fwd",))


EDGE_CASES = (
    _case("ragged: a tile and a bit in M, N and K", 70, 200, 208),
    _case("one_row: most of a tile is padding", 1, 64, 192),
    _case("odd_sizes: nothing is aligned", 7, 33, 45),
    _case("long_k: few tiles, so K is split", 5, 48, 4112),
    _case("k_1: an outer product", 9, 40, 1),
    _case("n_1: a matrix times a vector", 33, 1, 96),
    _case("gelu: an epilogue that ends in tanh", 12, 80, 144, bias=True, activation="gelu"),
    _case(
        "relu: with a bias, and a float32 result", 12, 40, 160, bias=True, activation="relu", out_dtype=torch.float32
    ),
    _case("silu: of sums without a bias", 12, 40, 160, activation="silu"),
    _case("swiglu: pairs of columns become one", 36, 144, 160, bias=True, activation="swiglu"),
    _case("empty: no rows", 0, 64, 160),
)


def _bad(
    name: str,
    match: str,
    a: tuple[int, ...] = (4, 32),
    b: tuple[int, ...] = (6, 32),
    scale_a: tuple[int, ...] = (4, 1),
    scale_b: tuple[int, ...] = (6, 1),
    dtype: torch.dtype = torch.int8,
    scales: torch.dtype = torch.float32,
    **options: Any,
) -> BadInput:
    def make(device: torch.device) -> Sample:
        operands = (torch.ones(shape, device=device).to(dtype) for shape in (a, b))
        factors = (torch.ones(shape, device=device).to(scales) for shape in (scale_a, scale_b))
        return Sample((*operands, *factors), options)

    return BadInput(name, make, match)


BAD_INPUTS = (
    _bad("K differs", r"a is \(4, 32\) and b is \(6, 31\); they must agree in K", b=(6, 31)),
    _bad("bytes", "a is .4, 32. torch.uint8; needs an int8 matrix", dtype=torch.uint8),
    _bad("a vector", r"a is \(32,\) torch.int8; needs a tensor \(..., M, K\)", a=(32,)),
    _bad("a batch of weights", r"b is \(2, 6, 32\) torch.int8; needs an int8 matrix", b=(2, 6, 32)),
    _bad("sums beyond int32", "K is 131072; at most 131071 products", a=(1, 2**17), b=(1, 2**17)),
    _bad("one scale for all", r"scale_a is \(1, 1\) torch.float32; needs \(4, 1\)", scale_a=(1, 1)),
    _bad("scales in one dimension", r"scale_b is \(6,\) torch.float32; needs \(6, 1\)", scale_b=(6,)),
    _bad("scales in half precision", "scale_a is .4, 1. torch.bfloat16; needs", scales=torch.bfloat16),
    _bad("unknown activation", "activation is 'tanh'; allowed are None, 'relu'", activation="tanh"),
    _bad("odd columns for a gate", "N must be even", b=(7, 32), scale_b=(7, 1), activation="swiglu"),
    _bad("integer result", "out_dtype is torch.int32; of torch.int8 operands it may be", out_dtype=torch.int32),
    _bad("bias too short", r"bias is \(5,\); needs \(6,\)", bias=torch.ones(5)),
)
