"""CUDA C++ that several test files compile."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.jit_kernels import Product, Scale, Side, product_mn, scale, share_tile

from tilewright.jit.compilers.cuda_build import find_tool
from tilewright.jit.selftest import Copy, Tile, tma_copy, wgmma_tile
from tilewright.ops.gemm.engines import dense_cuda, few_rows_cuda
from tilewright.ops.gemm.operands import ACTIVATIONS

PROBE = 'extern "C" __global__ void probe(int* p) { *p = 1; }\n'
COPY = Copy(64, 64, 4, torch.bfloat16)


def gemm(block_m: int, block_n: int, cluster: tuple[int, int] = (1, 1), majors: str = "kk", **options: Any) -> Any:
    """Parameters of the dense GEMM.  majors: of A, of B, "k" or "m" for contiguous along K or along M or N."""
    a, b = (int(major == "m") for major in majors)
    element = options.get("element", torch.bfloat16)
    out = options.get("out", element)
    activation, bias, addend = options.get("activation", ""), options.get("bias", False), options.get("addend", 0)
    stages = dense_cuda._config(
        dense_cuda.Tile(block_m, block_n, *cluster), dense_cuda.Problem(1, 1, 1, mn_major_b=bool(b))
    ).stages
    return dense_cuda.Params(
        *(block_m, block_n, stages, *cluster, a, b, ACTIVATIONS.index(activation), bias, addend),
        *(element, out, out, out),
    )


def few_rows(tokens: int, stages: int, split: int, activation: str = "", along_n: bool = False, **types: Any) -> Any:
    """Parameters of the GEMM for few rows."""
    element = types.get("element", torch.bfloat16)
    out = types.get("out", element)
    code = ACTIVATIONS.index(activation)
    return few_rows_cuda.Params(tokens, stages, split, 1, along_n, code, element, out, out, out)


# (kernel, parameters, instructions that must be there)
INSTANCES: list[tuple[Any, Any, dict[str, int]]] = [
    (tma_copy, COPY, {"UTMASTG": 1}),
    (wgmma_tile, Tile(128, 4, torch.bfloat16, torch.bfloat16), {"HGMMA": 4, "UTMALDG": 2, "UTMASTG": 2}),
    (wgmma_tile, Tile(256, 3, torch.float16, torch.float32), {"HGMMA": 4, "UTMALDG": 2}),
    (wgmma_tile, Tile(64, 4, torch.float8_e4m3fn, torch.float16), {"QGMMA": 4, "UTMALDG": 2, "UTMASTG": 1}),
    (scale, Scale(128, torch.bfloat16), {}),
    (share_tile, Side(32), {"UTMALDG": 1, "UTMAREDG": 1}),
    (product_mn, Product(torch.float16), {"HGMMA": 4, "UTMALDG": 3}),
    # The four layouts, clusters of both kinds, every road of the epilogue
    (dense_cuda.KERNEL, gemm(128, 256), {"HGMMA": 4, "UTMALDG": 2, "UTMASTG": 4}),
    (dense_cuda.KERNEL, gemm(128, 128, (2, 1), "km"), {"HGMMA": 4, "UTMALDG": 3, "UTMASTG": 2}),
    (dense_cuda.KERNEL, gemm(128, 192, majors="mm", out=torch.float32, addend=2), {"HGMMA": 4, "UTMASTG": 6}),
    (dense_cuda.KERNEL, gemm(128, 256, (1, 2), activation="swiglu"), {"HGMMA": 4, "UTMASTG": 2}),
    (
        dense_cuda.KERNEL,
        gemm(64, 96, majors="mk", activation="gelu", bias=True, element=torch.float16),
        {"HGMMA": 4, "UTMALDG": 2, "UTMASTG": 3},
    ),
    (few_rows_cuda.KERNEL, few_rows(8, 6, 8), {"HGMMA": 8, "UTMALDG": 4}),
    (few_rows_cuda.KERNEL, few_rows(64, 4, 1, "swiglu"), {"HGMMA": 8, "UTMALDG": 4}),
    (few_rows_cuda.KERNEL, few_rows(16, 6, 2, along_n=True, element=torch.float16, out=torch.float32), {"HGMMA": 8}),
]


def instance_name(value: object) -> str | None:
    return value.entry if hasattr(value, "entry") else "-".join(map(str, value)) if isinstance(value, tuple) else ""


def disassembler() -> Path:
    """cuobjdump, or a skip."""
    found = find_tool("cuobjdump")
    if found is None:
        pytest.skip("needs cuobjdump, of the CUDA toolkit or Triton")
    return found
