"""Cases of `sanitize_cases.py` for experts: the first product, whose gates are the first half of the weights."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from sanitize_values import DEVICE, HALF, UNWRITTEN, drawn, near, unwritten

from tilewright.ops.gemm.grouped.args import GroupedArgs
from tilewright.ops.gemm.kernels.sm90 import cost_model, dense, few_rows_grouped
from tilewright.ops.gemm.kernels.sm90 import few_rows_model as model
from tilewright.ops.moe.kernels.sm90 import expert_rows

# rows of groups, width of an expert, depth, kernel, tile or (tokens, split, blocks) or room
EXPERTS = (
    ((3, 0, 64, 1, 200, 0), 136, 328, "dense", (128, 256, 1, 1)),
    ((3, 0, 64, 1, 200), 136, 328, "dense", (64, 128, 2, 1)),
    ((3, 0, 17, 1, 40, 0), 72, 520, "few_rows", (32, 2, 2)),
    ((3, 0, 280, 1, 300, 16), 136, 328, "experts", (288,)),
    ((3, 0, 180, 1, 200), 72, 328, "experts", (192,)),
)


def gated_experts(sizes: Sequence[int], inner: int, k: int, name: str, shape: tuple[int, ...]) -> bool:
    """silu(gate) * up of groups that follow each other; rows of none stay as they were."""
    ends, rows = list(accumulate(sizes)), sum(sizes) + 5
    a, b = drawn(1, rows, k), drawn(len(sizes), 2 * inner, k)
    d = unwritten(1, rows, inner)
    limits = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    args = GroupedArgs(a, b.mT, None, None, None, limits, max(sizes), "swiglu", HALF)
    if name == "dense":
        tile: Any = dense.config_of(cost_model.Tile(*shape), cost_model.Problem(1, 1, 1))
        dense.gemm_rows(d, args, tile, halves=True)
    elif name == "few_rows":
        config: Any = model.deepest(shape[0], shape[1], shape[2], model.UNSCALED, grouped=True)
        few_rows_grouped.gemm_rows(d, args, config, halves=True)
    else:
        expert_rows.gemm_rows(d, args, shape[0])
    wanted = torch.full_like(d, UNWRITTEN, dtype=torch.float64)
    for g, (start, end) in enumerate(pairwise([0, *ends])):
        z = a[0, start:end].double() @ b[g].mT.double()
        wanted[0, start:end] = torch.nn.functional.silu(z[:, :inner]) * z[:, inner:]
    outside = wanted == UNWRITTEN
    return bool((d.double() == wanted)[outside].all()) and near(
        d.masked_fill(outside, 0), wanted.masked_fill(outside, 0)
    )


MOE_RUNS: tuple[tuple[str, Callable[..., bool], Sequence[tuple[Any, ...]]], ...] = (
    ("experts", gated_experts, EXPERTS),
)
