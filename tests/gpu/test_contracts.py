"""Every op, edge case and backend on a GPU, in the execution modes of `validate.check`.

An op's first case runs in all dtypes, each other one in the dtype that is next; with --exhaustive in all.  The first
dtype, mostly bf16, runs in every mode but the heavy ones; others in those that can tell them apart, because each
alignment and stride of a dtype makes Triton compile its kernels again.  Heavy modes run on one edge case of each op.
"""

import math
from dataclasses import replace

import pytest
import torch

import tilewright.ops  # noqa: F401 - binds every contract
from tilewright.dispatch import contract, contracts
from tilewright.validate import MODES, check

pytestmark = pytest.mark.gpu

OPS = sorted(contracts())
EDGE_CASES = [(name, w) for name in OPS for w in contract(name).edge_cases]
HEAVY = [mode.name for mode in MODES.values() if mode.heavy]
DERIVATIVES = {"double_backward", "forward_ad"}
CHECKED = 2**23  # elements of a matrix
DTYPE_MODES = ["eager", "backward", "poison", "out", "determinism", "batch_invariance", "cuda_graph"]


def portable(name):
    """Triton, or what `auto` takes of an op that has no kernel in Triton."""
    kernels = contract(name).forward.kernels
    return "triton" if not kernels or any(kernel.startswith("triton.") for kernel in kernels) else None


def name_of(value):
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if value is None:
        return "auto"
    return value if isinstance(value, str) else value.name.partition(":")[0]


def in_dtypes():
    for name in OPS:
        dtypes = contract(name).dtypes
        for place, workload in enumerate(contract(name).edge_cases):
            for turn, dtype in enumerate(dtypes):
                others = place > 0 and turn != place % len(dtypes)
                yield pytest.param(name, workload, dtype, marks=[pytest.mark.exhaustive] if others else [])


@pytest.mark.parametrize(("name", "workload", "dtype"), [*in_dtypes()], ids=name_of)
def test_edge_case(name, workload, dtype):
    options = {"modes": "quick" if dtype == contract(name).dtypes[0] else DTYPE_MODES, "dtype": dtype, "device": "cuda"}
    report = check(name, workload, backend=portable(name), **options)
    if all(result.status == "skipped" for result in report.results):  # the kernel refuses the case by name
        report = check(name, workload, **options)
    report.require()


@pytest.mark.parametrize(("name", "workload"), EDGE_CASES, ids=name_of)
def test_edge_case_of_the_reference(name, workload, exhaustive):
    """Every second case in the modes of a dtype, the others forward and backward."""
    subject = contract(name)
    modes = DTYPE_MODES if exhaustive or subject.edge_cases.index(workload) % 2 == 0 else ["eager", "backward"]
    check(name, workload, modes=modes, backend="torch", dtype=subject.dtypes[0], device="cuda").require()


@pytest.mark.parametrize(
    ("name", "backend"), [(name, each) for name in OPS for each in (portable(name), "torch")], ids=name_of
)
def test_registration_and_compilation(name, backend):
    """opcheck, torch.compile through Inductor with fixed and symbolic sizes, gradients of gradients, forward mode."""
    made = check(name, modes=HEAVY, backend=backend, dtype=contract(name).dtypes[0], device="cuda")
    left_out = DERIVATIVES if contract(name).gradient is None else set()
    assert {r.mode for r in made.require().results if r.status == "passed"} == {*HEAVY} - left_out, str(made)


@pytest.mark.parametrize("name", OPS)
def test_auto_is_right_whatever_it_picks(name):
    subject = contract(name)
    for dtype in subject.dtypes:
        check(name, subject.edge_cases[0], modes=["eager", "backward"], dtype=dtype, device="cuda").require()


def cut(params):
    """`params` with what 14 processes can check at once in float64: fewer rows, keys, groups and experts, and of
    a vocabulary with weights a part.
    """
    limits = {"M": min(1024, CHECKED // params.get("N", 1)), "E": 8, "G": 4, "N": 32768 if "K" in params else math.inf}
    small = {k: min(v, limits[k]) if k in limits else v for k, v in params.items()}
    return small | ({"S": min(params["S"], 1024)} if isinstance(params.get("S"), int) else {})


@pytest.mark.parametrize("name", OPS)
def test_model_sizes(name):
    """The first workload of the bench, cut."""
    workload = contract(name).workloads[0]
    modes = ["eager", "backward", "determinism", "cuda_graph"]
    cut_workload = replace(workload, params=cut(workload.params))
    check(name, cut_workload, modes=modes, backend=portable(name), device="cuda").require()


@pytest.mark.parametrize("name", OPS)
def test_promises_are_exercised_on_some_case(name):
    """Batch invariance, out= and guard bands may be skipped on a case, not on all."""
    subject = contract(name)
    left = {"guard_bands"}
    left |= {"batch_invariance"} if subject.promises.batch_invariant and subject.batch_dim is not None else set()
    left |= {"out"} if subject.forward.torch_out is not None else set()
    for workload in subject.edge_cases:
        made = check(
            name, workload, modes=sorted(left), backend=portable(name), dtype=subject.dtypes[-1], device="cuda"
        )
        assert not made.failures, str(made)
        left -= {r.mode for r in made.results if r.status == "passed"}
        if not left:
            return
    pytest.fail(f"no case exercises {', '.join(sorted(left))}")
