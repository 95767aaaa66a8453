"""`auto` does not give a GPU the eager reference, several kernels of torch, where a kernel of ours could run.

Every op at its smallest and oddest sizes is planned for an H200, without one.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tilewright.bench.cases import Case, known_contracts
from tilewright.dispatch import Contract, Workload
from tilewright.dispatch.contract import Direction
from tilewright.errors import InputError
from tilewright.hardware import arch
from tilewright.ops.attention.bucket import PROGRAM
from tilewright.validate.edge_grid import problems

ROOT = Path(__file__).parents[2]
HALF, SINGLE = (torch.bfloat16, torch.float16), torch.float32
OPS = [name for name, c in known_contracts().items() if not name.startswith("test_") and c.forward.compose is None]
ATTENTION = ("fmha", "fmha_varlen", "mla")

ALLOWED: dict[str, Callable[[Any, Case], bool]] = {
    # What is faster of many scores is not measured: torch's products are cuBLAS's, those of Triton FMAs.
    "float32 attention of long keys or many scores": lambda found, case: (
        case.contract.name in ATTENTION and case.dtype == SINGLE and _many_or_long(_sizes(found))
    ),
    # The product is one kernel of cuBLAS; activation, gate and addend are a few more.
    "large float32 product with an epilogue": lambda found, case: (
        case.contract.name in ("matmul", "bmm") and case.dtype == SINGLE and _epilogue_of_large(_sizes(found))
    ),
    # One kernel of cuDNN or FLASH, and steps over its result.
    "sinks join the result of many keys": lambda found, case: (
        case.contract.name == "fmha"
        and bool(case.workload.params.get("sinks"))
        and found.kernels <= 11
        and _sizes(found)["S_k"] > 512
    ),
    # One kernel of cuDNN, and steps over operands that are joined.
    "gradients of joined operands": lambda found, case: (
        case.contract.name == "mla" and case.direction == "bwd" and case.dtype in HALF and found.kernels <= 6
    ),
}


def _sizes(found: Any) -> dict[str, int]:
    return {name: int(value) for name, value in (part.split("=") for part in found.plan.bucket.split(","))}


def _epilogue_of_large(sizes: dict[str, int]) -> bool:
    large = sizes["K"] > 64 or sizes.get("B", 1) * sizes["M"] * sizes["N"] > 1 << 19
    return bool(sizes["epilogue"]) and large


def _many_or_long(sizes: dict[str, int]) -> bool:
    """Not of a program of masks, which hides keys."""
    elements = sizes["S_k"] * (max(sizes["D"], sizes["D_v"]) + sizes.get("D_pe", 0))
    return sizes["mask"] != PROGRAM and (elements > 1 << 15 or sizes["BH"] * sizes["S_q"] * elements > 1 << 26)


@pytest.fixture(scope="module")
def plans() -> Iterator[ModuleType]:
    """The planner of the benchmark of any size; the answers are those of an H200."""
    if arch("cuda") != "sm_90":
        pytest.skip("a GPU of another architecture is present, and plans are made for it")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("any_size_plans")
    finally:
        sys.path.pop(0)


def odd_cases(contract: Contract, density: float) -> Iterator[Case]:
    """Edge cases; where torch may be the guess, also in float32, and some of the grid of edge sizes."""
    guesses = any(raw.torch_first is not None for raw in contract.raw_ops)
    dtypes = [d for d in contract.dtypes if d == SINGLE] if guesses else []
    dtypes += [d for d in contract.dtypes if d == HALF[0]] or contract.dtypes
    workloads = [(workload, dtype) for workload in contract.edge_cases for dtype in dtypes]
    if guesses:
        found = problems(contract, 0, density=density)
        workloads += [(Workload(str(problem), problem.params), problem.dtype) for problem in found]
    directions: tuple[Direction, ...] = ("fwd", "bwd") if contract.gradient is not None else ("fwd",)
    return (Case(contract, workload, d, direction) for workload, d in workloads for direction in directions)


def eager(plans: ModuleType, cases: Iterator[Case]) -> tuple[list[str], set[str], int]:
    """(plans that are the eager reference and not allowed, reasons that allowed others, number of planned cases)."""
    wrong, reasons, count = [], set(), 0
    for case in cases:
        try:
            found = plans.planned(case)
        except (InputError, ZeroDivisionError):
            continue  # sizes of the grid that are no input of the op
        count += 1
        if not found.eager:
            continue
        because = [reason for reason, allows in ALLOWED.items() if allows(found, case)]
        reasons.update(because)
        if not because:
            named = f"{case.contract.name} {case.direction} {found.plan.bucket} {found.plan.dtype}"
            wrong.append(f"{named}: {found.kernels} kernels of torch, could be {', '.join(found.others)}")
    return wrong, reasons, count


@pytest.mark.parametrize("name", OPS)
def test_no_op_goes_to_its_eager_reference(name: str, plans: ModuleType, exhaustive: bool) -> None:
    wrong, _, count = eager(plans, odd_cases(known_contracts()[name], 0.5 if exhaustive else 0.2))
    assert count >= 6
    assert wrong == []


def test_what_is_allowed_is_needed(plans: ModuleType) -> None:
    def case(name: str, dtype: torch.dtype, direction: Direction = "fwd", **params: Any) -> Case:
        return Case(known_contracts()[name], Workload("one", params), dtype, direction)

    cases = (
        case("fmha", SINGLE, B=1, H=8, H_kv=2, S=300, D=64, causal=True),
        case("matmul", SINGLE, M=128, N=256, K=128, activation="swiglu"),
        case("fmha", HALF[0], B=1, H=8, S_q=16, S_k=8192, D=64, causal=True, sinks=True),
        case("mla", HALF[0], "bwd", B=1, H=16, S=20000, D=128, D_pe=64, D_v=128),
    )
    assert eager(plans, iter(cases)) == ([], set(ALLOWED), 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_few_scores_is_one_kernel_of_ours(
    causal: bool, direction: Direction, dtype: torch.dtype, plans: ModuleType
) -> None:
    params = {"B": 1, "H": 8, "S": 64, "D": 64, "causal": causal}
    found = plans.planned(Case(known_contracts()["fmha"], Workload("few", params), dtype, direction))
    assert found.plan.backend in found.plan.kernel or found.plan.kernel.startswith("sm90")
    assert found.kernels == 0


@pytest.mark.parametrize(
    ("sizes", "kernel"),
    [
        ({"S_q": 1, "S_k": 1024}, ""),
        ({"S_q": 1, "S_k": 2048}, ""),
        ({"S_q": 1, "S_k": 2048, "causal": False}, "_scaled_dot_product_cudnn_attention"),
        ({"S_q": 200, "S_k": 150}, ""),
        ({"S_q": 128, "S_k": 77, "B": 64, "causal": False}, "_scaled_dot_product_cudnn_attention"),
        ({"S_q": 200, "S_k": 256, "B": 8, "D_v": 64}, ""),
        ({"S_q": 200, "S_k": 256, "B": 8}, "_flash_attention_forward"),
        ({"S_q": 200, "S_k": 256, "B": 8, "D": 100}, ""),
    ],
    ids=["decode", "long_decode", "all_keys", "more_queries", "cross", "narrow_values", "chunk", "d_100"],
)
def test_what_torch_has_a_kernel_for(sizes: dict[str, Any], kernel: str, plans: ModuleType) -> None:
    """Decoding without a mask is cuDNN's, which divides the keys; what neither it nor FLASH takes is ours."""
    params = {"B": 1, "H": 8, "H_kv": 2, "D": 128, "causal": True, **sizes}
    found = plans.planned(Case(known_contracts()["fmha"], Workload("one", params), torch.bfloat16, "fwd"))
    assert (found.plan.backend == "torch") is bool(kernel)
    assert found.names == ((kernel,) if kernel else ())


@pytest.mark.parametrize(
    ("sizes", "kernels"),
    [({}, 1), ({"causal": True, "S_k": 4096}, 1), ({"H_kv": 4}, 30), ({"B": 1, "H": 4, "S_q": 1, "S_k": 65536}, 10)],
    ids=["cross", "causal", "grouped", "few_tiles"],
)
def test_float32_is_one_kernel_where_torch_has_one(sizes: dict[str, Any], kernels: int, plans: ModuleType) -> None:
    params = {"B": 16, "H": 16, "S_q": 4096, "S_k": 333, "D": 128, **sizes}
    found = plans.planned(Case(known_contracts()["fmha"], Workload("one", params), SINGLE, "fwd"))
    assert found.plan.backend == "torch"
    assert (found.names == ("_efficient_attention_forward",)) is (kernels == 1)
    assert found.kernels >= kernels
