"""Documents by the id of every key in attention: results, gradients, and which kernels are chosen."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.ops.attention.bounds import problem

from tilewright import mask as masks
from tilewright import ops
from tilewright.bench.cases import Case, known_contracts
from tilewright.dispatch import Workload, record
from tilewright.dispatch.contract import Direction
from tilewright.hardware import arch

IDS = {
    "in order": [[0, 0, 0, 1, 1, 2, 2, 2, 2, 4, 4]],
    "runs in any order": [[7, 7, 3, 3, 3, 9, -1, -1, -1, -1, -1]],
    "they come again": [[0, 0, 1, 1, 0, 0, 2, 2, 1, 1, 0]],
    "one": [[5] * 11],
    "each its own": [list(range(11))],
    "rows": [[0, 0, 0, 1, 1, 2, 2, 2, 2, 4, 4], [7, 7, 7, 7, 7, 7, 8, 9, 9, 9, 9]],
    "rows, some come again": [[0, 0, 0, 1, 1, 2, 2, 2, 2, 4, 4], [7, 7, 8, 7, 7, 7, 8, 9, 9, 9, 9]],
}
BANDS = {"alone": (None, None), "causal": (0, None), "window": (-1, 2)}
"""(lowest, highest) distance from key to query."""
PROGRAMS = {
    "they come again": {"doc:0", "band:0 doc:2 &"},
    "rows": {"seq.b:0"},
    "rows, some come again": {"doc.b:0", "band:0 doc.b:2 &"},
}


@pytest.mark.parametrize("s_q", [11, 4, 15])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("name", IDS)
def test_results_and_gradients_are_those_of_the_dense_mask(name, band, s_q):
    ids, (low, high) = torch.tensor(IDS[name]), BANDS[band]
    q, k, v = (t.requires_grad_() for t in problem(2, 4, 2, s_q, 11, 16, dtype=torch.float64, device="cpu"))
    mask = masks.document(ids) & masks.window(high, None if low is None else -low)
    with record() as notes:
        o = ops.fmha(q, k, v, mask=mask)
    programs = PROGRAMS.get(name, {"seq:0"})
    assert notes.calls[0][1][6] in programs

    position = torch.arange(s_q) + 11 - s_q
    distance = position[:, None] - torch.arange(11)
    shown = (ids[:, position.clamp(0), None] == ids[:, None]) & (position[:, None] >= 0)
    shown &= (distance >= (-99 if low is None else low)) & (distance <= (99 if high is None else high))
    scores = q @ k.repeat_interleave(2, 1).mT * 16**-0.5
    weights = scores.masked_fill(~shown[:, None], -1e30).softmax(-1) * shown.any(-1)[:, None, :, None]
    expected = weights @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(o, expected)
    do = torch.randn_like(o)
    for found, wanted in zip(*(torch.autograd.grad(x, (q, k, v), do) for x in (o, expected)), strict=True):
        torch.testing.assert_close(found, wanted)


def test_ids_for_another_batch_are_told():
    q, k, v = problem(3, 4, 2, 11, 11, 16, dtype=torch.bfloat16, device="cpu")
    mask = masks.document(torch.tensor(IDS["rows"]))
    with pytest.raises(Exception, match="B = 2; the attention has B = 3"):
        ops.fmha(q, k, v, mask=mask)
    with pytest.raises(Exception, match="B = 2; the attention has B = 3"):
        ops.fmha(q, k, v, mask=mask.fitted(11, 11))


# Which kernel runs, on an H200 that need not be here.


@pytest.fixture(scope="module")
def plans() -> Iterator[ModuleType]:
    """The planner of the benchmark of any size."""
    if arch("cuda") != "sm_90":
        pytest.skip("a GPU of another architecture is present, and plans are made for it")
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    try:
        yield import_module("any_size_plans")
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(
    ("params", "kernels"),
    [
        ({"documents": 16}, ("sm90.forward", "sm90.backward")),
        ({"rows": 16}, ("sm90.forward", "sm90.backward")),
        ({"rows": 16, "B": 1}, ("sm90.forward", "sm90.backward")),
        ({"ids": 16}, ("sm90.forward", "triton.backward")),
    ],
    ids=["cu_seqlens", "rows", "one row", "in pieces"],
)
def test_intervals_reach_the_kernels_of_cuda_both_ways(
    params: dict[str, Any], kernels: tuple[str, str], direction: Direction, plans: ModuleType
) -> None:
    sizes = {"B": 2, "H": 32, "H_kv": 8, "S": 4096, "D": 128, **params}
    case = Case(known_contracts()["fmha"], Workload("documents", sizes), torch.bfloat16, direction)
    assert plans.planned(case).plan.kernel == kernels[direction == "bwd"]
