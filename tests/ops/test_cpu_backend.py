"""The C++ kernels of the `cpu` backend: every edge case by the rule, special values, any number of threads."""

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.harness.refusals import refusal

import tilewright.ops as ops
from tilewright import settings
from tilewright.dispatch import backends, contract, numerics
from tilewright.errors import BackendError
from tilewright.jit import cache
from tilewright.jit.compilers import get_compiler
from tilewright.log import forget_logged
from tilewright.validate import MODES, check

pytestmark = pytest.mark.skipif(get_compiler("host").version() is None, reason=get_compiler("host").install())

NAMES = ("add_rms_norm", "apply_rope", "gelu_and_mul", "rms_norm", "silu_and_mul", "softmax", "swiglu")
EDGE_CASES = [(name, w, refusal(contract(name), w.params, "cpu")) for name in NAMES for w in contract(name).edge_cases]
CASES = [(name, w) for name, w, reason in EDGE_CASES if reason is None]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUICK = [mode.name for mode in MODES.values() if not mode.heavy and mode.name not in ("cuda_graph", "side_stream")]
ALWAYS = {"eager", "inputs_unchanged", "poison", "guard_bands", "determinism", "changed_inputs", "offset"}


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[None]:
    """One cache for this module, shared by all workers of a run."""
    base = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWRIGHT_CACHE_DIR", str((base if worker_id == "master" else base.parent) / "cpu_kernels"))
        settings.reload()
        yield
    settings.reload()


def case_id(value):
    return value if isinstance(value, str) else value.name.partition(":")[0]


@pytest.mark.parametrize(("name", "workload"), CASES, ids=case_id)
def test_edge_case(name, workload, exhaustive):
    """The forward alone: a strict wish would ask for a backward of ours too, and there is none.

    In one dtype, which is another from case to case, or in all.
    """
    forward = replace(contract(name), gradient=None)
    turn = forward.edge_cases.index(workload) % len(DTYPES)
    for dtype in DTYPES if exhaustive else DTYPES[turn : turn + 1]:
        made = check(forward, workload, modes=QUICK, backend="cpu", dtype=dtype, device="cpu").require()
        ran = {r.mode for r in made.results if r.status == "passed"}
        assert ran >= ALWAYS or workload.name.startswith("empty"), str(made)


def test_only_options_of_a_gate_are_refused():
    assert {reason for *_, reason in EDGE_CASES if reason is not None} == {"has no gate_multiplier and no limit"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight", DTYPES)
def test_rms_norm_takes_any_pair_of_dtypes(dtype, weight):
    x, w = torch.randn(3, 100).to(dtype), torch.randn(100).to(weight)
    for options in ({}, {"offset": 1.0}, {"fp32_weight": True}):
        ours = ops.rms_norm(x, w, backend="cpu", **options)
        theirs = ops.rms_norm(x, w, backend="torch", **options)
        assert ours.dtype == theirs.dtype
        assert torch.allclose(ours.float(), theirs.float(), rtol=2 * torch.finfo(ours.dtype).eps, atol=1e-6)


def test_a_float64_weight_promotes_the_result():
    x, w = torch.randn(3, 100), torch.randn(100, dtype=torch.float64)
    ours = ops.rms_norm(x, w, backend="cpu")
    assert ours.dtype == torch.float64
    assert torch.allclose(ours, ops.rms_norm(x, w, backend="torch"), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_of_special_rows_is_torchs(dtype):
    inf, nan = torch.inf, torch.nan
    for n in (5, 64, 9000):  # a tail alone; whole vectors; exponentials computed twice
        x = torch.randn(5, n).to(dtype)
        x[0] = -inf
        x[1, 1], x[2, 2], x[3, 3] = inf, nan, -inf
        ours, theirs = ops.softmax(x, backend="cpu"), ops.softmax(x, backend="torch")
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert ours[3, 3] == 0
        assert torch.allclose(ours[3:].float(), theirs[3:].float(), rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_of_special_values_are_those_of_float64(dtype):
    gate = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 6e4, -6e4], dtype=dtype)
    up = torch.ones_like(gate)
    packed = torch.cat([gate, up])
    for op, args, options in (
        (ops.swiglu, (gate, up), {}),
        (ops.silu_and_mul, (packed,), {}),
        (ops.gelu_and_mul, (packed,), {}),
        (ops.gelu_and_mul, (packed,), {"approximate": "none"}),
    ):
        ours = op(*args, backend="cpu", **options)
        exact = op(*[a.double() for a in args], backend="torch", **options).to(dtype)
        assert torch.equal(ours.isnan(), exact.isnan())
        assert torch.equal(ours[~ours.isnan()], exact[~ours.isnan()])


def test_a_nan_of_any_payload_stays_nan():
    """Rounding would carry out of this one: 0x7FFFFFFF."""
    weight = torch.full((40,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    x = torch.randn(2, 40).bfloat16()
    assert ops.rms_norm(x, weight, fp32_weight=True, backend="cpu").isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_results_do_not_depend_on_the_number_of_threads(name):
    params = {"B": 1, "S": 700, "H": 3, "H_kv": 1, "D": 64} if name == "apply_rope" else {"M": 53, "N": 4103}
    sample = contract(name).inputs(params, torch.bfloat16, torch.device("cpu"), 0)
    made = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)  # `_one_thread` of conftest.py puts it back
        result = contract(name).function(*sample.args, **sample.kwargs, backend="cpu")
        made.append(result if isinstance(result, tuple) else (result,))
    for other in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], other, strict=True))


def test_a_position_outside_the_table_is_nan_where_no_check_ran():
    rope = contract("apply_rope").forward
    q, k, table = torch.randn(4, 2, 8), torch.randn(4, 1, 8), torch.randn(3, 8)
    positions = torch.tensor([0, 3, -1, 2])
    yq, yk = rope.torch_op(q, k, table, table, positions, False, 0, "cpu!", "default")
    for y in (yq, yk):
        assert y.isnan().flatten(1).all(1).tolist() == [False, True, True, False]


def test_rotary_dimensions_beyond_the_kernels_are_refused():
    q, table = torch.randn(1, 1, 2, 4096), torch.randn(1, 2, 4096)
    with pytest.raises(BackendError, match="takes rotary dimensions up to 2048, got 4096"):
        ops.apply_rope(q, q, table, table, backend="cpu")


def test_auto_takes_it_on_a_cpu_also_for_invariant_numerics():
    x = (torch.randn(4, 8),)
    assert contract("softmax").forward.plan(x, "auto", "default").backend == "cpu"
    with numerics("batch_invariant"):
        assert contract("softmax").forward.plan(x, "auto", "batch_invariant").backend == "cpu"


def test_without_a_compiler_torch_runs_and_one_line_says_so(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "tilewright")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    settings.reload()
    cache.forget()
    monkeypatch.setattr(backends, "_compilable", set())
    forget_logged()
    forward = contract("softmax").forward
    forward.forget_plans()
    x = torch.randn(3, 7)
    for n in (7, 6, 5):
        assert torch.equal(ops.softmax(x[:, :n]), torch.softmax(x[:, :n], -1))
    said = [r.message for r in caplog.records if "compiler" in r.message]
    assert len(said) == 1
    assert "cpu backend has no compiler here: install GCC" in said[0]
    with pytest.raises(BackendError, match="has no compiler here: install GCC 11 or newer"):
        ops.softmax(x, backend="cpu")
    monkeypatch.undo()
    settings.reload()
    cache.forget()
    forward.forget_plans()
