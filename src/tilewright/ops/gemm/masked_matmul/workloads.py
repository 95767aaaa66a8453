"""What the bench measures: a decoding step of a mixture of experts, and a chunk of prefill.

Every row counts there, because the bench compares whole results: rows that do not count hold anything.
"""

from typing import Any

import torch

from tilewright.dispatch import Workload
from tilewright.ops.gemm.grouped_matmul.workloads import LAYERS
from tilewright.ops.gemm.scaled.scaling import Scaling

SPLITS = ((32, 20), (8, 16), (6, 1024))
"""Groups, and the rows that each has."""


def _row(g: int, m: int, n: int, k: int, dtype: torch.dtype, **options: Any) -> Workload:
    name = f"{'fp8' if dtype.itemsize == 1 else 'bf16'}_{g}x{m}_{n}x{k}"
    return Workload(name, {"G": g, "M": m, "N": n, "K": k, **options}, (dtype,), ("fwd",))


WORKLOADS = (
    *(_row(g, m, n, k, torch.bfloat16) for g, m in SPLITS for n, k in LAYERS),
    *(_row(g, m, n, k, torch.float8_e4m3fn, scaling=int(Scaling.TOKEN_BLOCK)) for g, m in SPLITS for n, k in LAYERS),
)
CPU_WORKLOADS = (Workload("small", {"G": 4, "M": 16, "N": 128, "K": 256}, directions=("fwd",)),)


def _case(name: str, g: int, m: int, n: int, k: int, **options: Any) -> Workload:
    return Workload(name, {"G": g, "M": m, "N": n, "K": k, **options})


EDGE_CASES = (
    _case("ragged: a tile and a bit in M, N and K", 3, 70, 136, 72),
    _case("one_row: most of a tile is padding", 5, 1, 64, 96),
    _case("one: a single group", 1, 37, 72, 40),
    _case("odd_sizes: no row is aligned", 3, 7, 33, 45),
    _case("nn: b is row-major", 2, 20, 72, 56, layout="nn"),
    _case("swiglu: pairs of columns become one", 2, 36, 144, 64, activation="swiglu"),
    _case("silu: an epilogue", 2, 12, 40, 32, activation="silu"),
    _case("float32: the result is wider than the operands", 2, 36, 80, 64, out_dtype=torch.float32),
    _case("empty: no rows", 3, 0, 64, 32),
)
