"""Every contract keeps its word, on the torch backend and a CPU: what needs no kernel of ours to be wrong.

A wrong reference, gradient, fake, check or promise shows here, in every mode of `validate.check` but those of a GPU.
The kernels themselves are checked by the same modes in `tests/gpu`.
"""

import inspect

import pytest
import torch
from torch.utils._pytree import tree_leaves

import tilewright.ops
from tilewright.dispatch import contract, contracts
from tilewright.validate import MODES, check

CPU = torch.device("cpu")
OPS = sorted(contracts())
EDGE_CASES = [(name, w) for name in OPS for w in contract(name).edge_cases]
QUICK = [mode.name for mode in MODES.values() if not mode.heavy and mode.name not in ("cuda_graph", "side_stream")]
# Many calls each, and torch's own kernels keep nothing between calls on a CPU: with --exhaustive
REPEATED = {"determinism", "changed_inputs"}
TRUTHS = {"gradient_subsets"}
"""One truth for each output, which is most of the time of a case: in every second of the cases in all modes."""
HEAVY = [mode.name for mode in MODES.values() if mode.heavy]
DERIVATIVES = {"double_backward", "forward_ad"}
SEED = 20261123  # torch on a CPU has nothing to hide: a failure repeats.  On a GPU and in `check` seeds are fresh
READ_IN_PART = {"verify_chain"}  # the data say which rows are needed
LARGE = 1 << 18  # elements; above, a case is there for a kernel's other road, and torch has only one


def case_id(value):
    return value if isinstance(value, str) else value.name.partition(":")[0]


def first_tensor(sample):
    return next(v for v in tree_leaves(sample.args) if isinstance(v, torch.Tensor))


def test_every_public_op_has_a_contract():
    public = {name for name in tilewright.ops.__all__ if callable(getattr(tilewright.ops, name))}
    assert public
    assert public <= set(OPS)


@pytest.mark.parametrize(("name", "workload"), EDGE_CASES, ids=case_id)
def test_edge_case(name, workload, exhaustive):
    """In one dtype, which is another from case to case, and every second case in all modes but a few; or all of it."""
    subject = contract(name)
    place = subject.edge_cases.index(workload)
    large = first_tensor(subject.inputs(workload.params, subject.dtypes[0], CPU, 0)).numel() > LARGE
    left_out = set() if exhaustive else REPEATED | (TRUTHS if place % 4 else set())
    modes = [mode for mode in QUICK if mode not in left_out]
    if large or (place % 2 and not exhaustive):
        modes = ["eager", "backward"]
    turn = place // 2 % len(subject.dtypes)
    for dtype in subject.dtypes if exhaustive else subject.dtypes[turn : turn + 1]:
        check(name, workload, modes=modes, backend="torch", dtype=dtype, device="cpu", seed=SEED).require()


@pytest.mark.parametrize("name", OPS)
def test_registration_and_compilation(name, exhaustive):
    """opcheck, torch.compile down to AOTAutograd (Inductor in the GPU tests), gradients of gradients, forward mode.

    Every fourth op is traced with symbolic sizes, too; all are, and one graph serves several batch sizes, with
    --exhaustive and in the GPU tests.
    """
    dtype = contract(name).dtypes[0]
    modes = {*HEAVY} - (set() if exhaustive else {"compile_dynamic"})
    if OPS.index(name) % 4 and not exhaustive:
        modes -= {"symbolic_sizes"}
    made = check(name, modes=[*modes], backend="torch", dtype=dtype, device="cpu", compiler="aot_eager")
    if contract(name).gradient is None:
        modes -= DERIVATIVES
    assert {r.mode for r in made.require().results if r.status == "passed"} == modes, str(made)


@pytest.mark.parametrize("name", OPS)
def test_a_mode_that_is_promised_runs_on_some_case(name):
    """A skip must not hide a promise: out= and empty input are exercised at least once."""
    subject = contract(name)
    modes = ["empty", "out", "bad_inputs"]
    small = next(w for w in subject.edge_cases if "M" not in w.params or w.params["M"] > 1)
    made = check(name, small, modes=modes, backend="torch", dtype=subject.dtypes[-1], device="cpu")
    assert not made.failures, str(made)  # an op with neither promise has only its refusals looked at
    ran = {r.mode for r in made.results if r.status == "passed"}
    expected = {"bad_inputs"}
    expected |= {"out"} if subject.forward.torch_out is not None else set()
    expected |= {"empty"} if subject.batch_dim is not None else set()
    assert ran == expected, str(made)


@pytest.mark.parametrize("name", OPS)
def test_a_refusal_reads_no_data(name):
    """As on a GPU, for which no check waits: tensors without data, and all of a call on one device that is no CPU."""
    for bad in contract(name).bad_inputs:
        sample = bad.make(torch.device("meta"))
        with pytest.raises(bad.error, match=bad.match):
            contract(name).function(*sample.args, **sample.kwargs)


@pytest.mark.parametrize("name", OPS)
def test_the_contract_is_complete(name):
    subject = contract(name)
    public = list(inspect.signature(subject.function).parameters)
    assert public[-1] == "backend"
    assert [p for p in public if p not in ("out", "backend")] == list(inspect.signature(subject.reference).parameters)
    assert ("out" in public) == (subject.forward.torch_out is not None)
    assert len(subject.edge_cases) >= 5
    assert subject.bad_inputs
    assert subject.workloads
    assert subject.cpu_workloads
    named = [w.name for w in (*subject.workloads, *subject.cpu_workloads, *subject.edge_cases)]
    assert len(named) == len(set(named))


@pytest.mark.parametrize("name", OPS)
def test_inputs_are_fresh_by_seed_and_the_same_on_request(name):
    subject = contract(name)
    params, dtype = subject.edge_cases[0].params, subject.dtypes[-1]
    first, same, other = (first_tensor(subject.inputs(params, dtype, CPU, seed)) for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", OPS)
def test_cost_counts_at_least_the_tensors(name):
    """The floor of a forward: every input element read and every output element written once, if it counts them all."""
    subject = contract(name)
    sample = subject.inputs(subject.cpu_workloads[0].params, subject.dtypes[-1], CPU, 0)
    for direction in ("fwd", "bwd") if subject.gradient is not None else ("fwd",):
        cost = subject.cost(sample, direction)
        assert cost.flops > 0
        assert cost.bytes_read >= first_tensor(sample).nbytes or name in READ_IN_PART
        assert cost.bytes_written > 0
