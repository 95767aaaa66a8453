"""What the bench measures: gradients of experts' weights, groups of uneven sizes, in every other case some empty.

Results of bfloat16 are what torch's grouped product makes; of float32, what training adds up.
"""

from typing import Any

import torch

from tilewright.dispatch import Workload
from tilewright.ops.gemm.scaled.scaling import Scaling

SIZES = ((4096, 7168), (7168, 2048))
"""(M, N) of a weight gradient."""
SPLITS = ((4, 4096, "random"), (8, 4096, "sparse"))
"""Groups, rows a group has on average, and how they differ."""


def _row(g: int, k: int, split: str, m: int, n: int, dtype: torch.dtype, **options: Any) -> Workload:
    into = "_to_bf16" if options.get("out_dtype") else ""
    name = f"{'fp8' if dtype.itemsize == 1 else 'bf16'}_{g}x{k}_{m}x{n}{into}"
    return Workload(name, {"G": g, "M": m, "N": n, "K": k, "split": split, **options}, (dtype,), ("fwd",))


WORKLOADS = (
    *(
        _row(g, k, split, m, n, torch.bfloat16, out_dtype=out_dtype)
        for out_dtype in (torch.bfloat16, None)
        for g, k, split in SPLITS
        for m, n in SIZES
    ),
    *(
        _row(g, k, split, m, n, torch.float8_e4m3fn, scaling=int(Scaling.TOKEN_TOKEN), layout="nt")
        for g, k, split in SPLITS
        for m, n in SIZES
    ),
)
CPU_WORKLOADS = (Workload("small", {"G": 4, "M": 64, "N": 128, "K": 64, "split": "random"}, directions=("fwd",)),)


def _case(name: str, g: int, m: int, n: int, k: int, **options: Any) -> Workload:
    return Workload(name, {"G": g, "M": m, "N": n, "K": k, **options})


EDGE_CASES = (
    _case("even: a tile and a bit in all sizes", 2, 70, 72, 72),
    _case("ragged: groups begin at any row", 5, 24, 40, 30, split="random"),
    _case("one: a single group has all rows", 3, 20, 72, 40, split="one"),
    _case("sparse: empty groups are zeros", 5, 20, 40, 24, split="sparse"),
    _case("accumulate: empty groups are c", 4, 20, 40, 24, split="sparse", c=True),
    _case("odd_sizes: no row is aligned", 3, 7, 33, 45, split="random"),
    _case("nt: both operands along T", 3, 20, 72, 40, layout="nt", split="random"),
    _case("nn: a along T, b along N", 3, 20, 72, 40, layout="nn", split="random"),
    _case("bfloat16: a gradient as narrow as its weight", 3, 20, 72, 40, out_dtype=torch.bfloat16, split="random"),
    _case("empty: nothing to sum", 3, 24, 40, 0),
)
