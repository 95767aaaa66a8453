"""What the bench measures: training and prefill of mixtures of experts, as DeepGEMM's own benchmark lists them."""

from typing import Any

import torch

from tilewright.dispatch import Workload
from tilewright.ops.gemm.scaled.scaling import Scaling

LAYERS = ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048))
"""(N, K) of experts."""
SPLITS = ((4, 8192), (8, 4096))
"""Groups, and the rows that each has."""


def _row(g: int, m: int, n: int, k: int, dtype: torch.dtype, **options: Any) -> Workload:
    name = f"{'fp8' if dtype.itemsize == 1 else 'bf16'}_{g}x{m}_{n}x{k}"
    return Workload(name, {"G": g, "M": m, "N": n, "K": k, **options}, (dtype,), ("fwd",))


WORKLOADS = (
    *(_row(g, m, n, k, torch.bfloat16) for g, m in SPLITS for n, k in LAYERS),
    *(_row(g, m, n, k, torch.float8_e4m3fn, scaling=int(Scaling.TOKEN_BLOCK)) for g, m in SPLITS for n, k in LAYERS),
    Workload(
        "bf16_ragged_64x512_4096x2048",
        {"G": 64, "M": 512, "N": 4096, "K": 2048, "split": "random"},
        (torch.bfloat16,),
    ),
)
CPU_WORKLOADS = (Workload("small", {"G": 4, "M": 16, "N": 128, "K": 256, "split": "random"}),)


def _case(name: str, g: int, m: int, n: int, k: int, **options: Any) -> Workload:
    return Workload(name, {"G": g, "M": m, "N": n, "K": k, **options})


EDGE_CASES = (
    _case("even: groups of a tile and a bit", 2, 70, 72, 40),
    _case("ragged: groups begin at any row", 5, 24, 72, 56, split="random"),
    _case("one: a single group has all rows", 4, 20, 72, 40, split="one"),
    _case("sparse: every other group is empty", 6, 15, 40, 64, split="sparse"),
    _case("below_a_tile: groups of one row", 7, 1, 64, 96),
    _case("single: one group is a plain product", 1, 37, 72, 40),
    _case("many: more groups than are read at once", 70, 1, 40, 32, split="random"),
    _case("odd_sizes: no row is aligned", 3, 7, 33, 45, split="random"),
    _case("nn: b is row-major", 3, 20, 72, 56, layout="nn", split="random"),
    _case("long_k: many steps of the accumulator", 3, 4, 48, 1032, split="random"),
    _case("swiglu: pairs of columns become one", 3, 20, 144, 64, activation="swiglu", split="random"),
    _case("gelu: an epilogue", 3, 12, 40, 32, activation="gelu", split="random"),
    _case("float32: the result is wider than the operands", 3, 20, 72, 64, out_dtype=torch.float32, split="random"),
    _case("empty: no rows", 3, 0, 64, 32),
)
