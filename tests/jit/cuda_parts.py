"""CUDA C++ that several test files compile."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.jit_kernels import Product, Scale, Side, product_mn, scale, share_tile

from tilewright.jit.compilers.cuda_build import find_tool
from tilewright.jit.selftest import Copy, Tile, tma_copy, wgmma_tile

PROBE = 'extern "C" __global__ void probe(int* p) { *p = 1; }\n'
COPY = Copy(64, 64, 4, torch.bfloat16)

# (kernel, parameters, instructions that must be there)
INSTANCES: list[tuple[Any, Any, dict[str, int]]] = [
    (tma_copy, COPY, {"UTMASTG": 1}),
    (wgmma_tile, Tile(128, 4, torch.bfloat16, torch.bfloat16), {"HGMMA": 4, "UTMALDG": 2, "UTMASTG": 2}),
    (wgmma_tile, Tile(256, 3, torch.float16, torch.float32), {"HGMMA": 4, "UTMALDG": 2}),
    (wgmma_tile, Tile(64, 4, torch.float8_e4m3fn, torch.float16), {"QGMMA": 4, "UTMALDG": 2, "UTMASTG": 1}),
    (scale, Scale(128, torch.bfloat16), {}),
    (share_tile, Side(32), {"UTMALDG": 1, "UTMAREDG": 1}),
    (product_mn, Product(torch.float16), {"HGMMA": 4, "UTMALDG": 3}),
]


def instance_name(value: object) -> str | None:
    return value.entry if hasattr(value, "entry") else "-".join(map(str, value)) if isinstance(value, tuple) else ""


def disassembler() -> Path:
    """cuobjdump, or a skip."""
    found = find_tool("cuobjdump")
    if found is None:
        pytest.skip("needs cuobjdump, of the CUDA toolkit or Triton")
    return found
