"""Random problems, costs, workloads and edge cases of `weight_only_matmul`.

`params`: M, N, K, optional bits (8, or 4), bias, activation, out_dtype, scale_dtype (that of x by default).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Cost, Sample, Workload
from tilewright.ops import rows
from tilewright.ops.gemm.operands import columns_out
from tilewright.ops.weight_only import packing
from tilewright.ops.weight_only.samples import random_weight


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """Results are of size 1; an odd K becomes even at 4 bits, an odd N for "swiglu"."""
    g = rows.generator(seed)
    m, n, k, bits = params["M"], params["N"], params["K"], params.get("bits", 8)
    k += k % 2 if bits == 4 else 0
    n += n % 2 if params.get("activation") == "swiglu" else 0
    x = rows.random_tensor((m, k), dtype, device, g)
    scale_dtype = params.get("scale_dtype", dtype)
    q, scales = random_weight(n, k, bits, scale_dtype, device, g)
    options = {name: params[name] for name in ("activation", "out_dtype") if name in params}
    if params.get("bias"):
        options["bias"] = rows.random_tensor((n,), dtype, device, g)
    return Sample((x, q, scales), options)


def cost(sample: Sample, direction: str) -> Cost:
    """Two operations a product of elements; every operand read once, as stored, the result written once."""
    x, q, scales = sample.args
    m, n = x.numel() // max(x.shape[-1], 1), q.shape[0]
    n_out = columns_out(n, sample.kwargs.get("activation") or "")
    out_dtype = sample.kwargs.get("out_dtype") or x.dtype
    flops = 2 * m * n * packing.depth_of(q)
    return Cost(flops, rows.nbytes(x, q, scales, sample.kwargs.get("bias")), m * n_out * out_dtype.itemsize)


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
