"""The GEMM suite on the CPU: its rows, its peers, and paused times of what is compute-bound."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewright.ops  # noqa: F401  (binds the contracts)
from tilewright.bench import peers, suite
from tilewright.bench.cases import Case, select
from tilewright.bench.measure import Effort, case, shared
from tilewright.bench.suite import run
from tilewright.dispatch import Workload, contract
from tilewright.ops.gemm.dense.workloads import AUTOTUNED, WORKLOADS
from tilewright.ops.gemm.peers.matmul import PEERS, Autotuned, Problem

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SIZES = {"M": 64, "N": 64, "K": 256}  # 14 flops a byte


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rounds, no ceilings: the tests judge structure, not speed."""
    monkeypatch.setattr(suite, "_CPU", Effort(rounds=3, graph_rounds=0, host_rounds=2, paused_rounds=2))
    monkeypatch.setattr(suite, "headline", lambda device: {"read_gb_s": 1.0})
    monkeypatch.setattr(case, "sets_for", lambda *args, **kwargs: 2)
    monkeypatch.setattr("tilewright.bench.timing.PAUSE_S", 0.0)


def small(**changes: Any) -> Any:
    given = {"ops": ["matmul"], "case": SIZES, "dtype": "fp32", "against": ["eager"], "device": CPU, **changes}
    return run("gemm", **given)


@pytest.mark.usefixtures("brief")
def test_a_compute_bound_row_has_paused_times_of_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "matrix_rate", lambda dtype, device: 1.0)  # a flop a microsecond: the floor is high
    monkeypatch.setattr(case, "MATRIX_SHARE", 0.0)
    results = small()
    assert results.ok, results.failures
    (row,) = results.rows
    assert row.floor_us == pytest.approx(2 * 64 * 64 * 256, rel=1e-4)
    assert set(row.paused) == {*row.impls, *row.peers}
    assert (row.ratio_own_paused is None) == (set(row.impls) == {"torch"})


@pytest.mark.usefixtures("brief")
def test_a_memory_bound_row_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "matrix_rate", lambda dtype, device: 1e12)
    (row,) = small().rows
    assert row.paused == {}
    assert row.ratio_own_paused is None


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(("of_floor", "fails"), [(0.9, False), (0.7, True)])
def test_faster_than_a_matrix_floor_fails_below_four_fifths_of_it(
    monkeypatch: pytest.MonkeyPatch, of_floor: float, fails: bool
) -> None:
    """The floor is measured with cuBLAS, and a better kernel is no fault."""
    floor = 2 * 64 * 64 * 256
    monkeypatch.setattr(shared, "matrix_rate", lambda dtype, device: 1.0)
    real = case.interleave

    def scripted(calls: Any, **options: Any) -> Any:
        return {name: replace(each, us=[of_floor * floor] * 3) for name, each in real(calls, **options).items()}

    monkeypatch.setattr(case, "interleave", scripted)
    results = small()
    assert any("faster than its floor" in note.reason for note in results.failures) is fails


def test_every_declared_row_is_a_forward_of_one_name() -> None:
    names = [workload.name for workload in WORKLOADS]
    assert len(names) == len(set(names))
    assert 100 <= len(names) <= 130
    assert len(AUTOTUNED) == 12
    assert set(names) >= AUTOTUNED
    assert {workload.directions for workload in WORKLOADS} == {("fwd",)}
    layouts = {workload.params.get("layout", "nt") for workload in WORKLOADS}
    assert layouts == {"nt", "nn", "tn"}


def test_every_declared_row_can_be_made() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        for item in select("gemm", device=GPU):
            sample = item.contract.inputs(item.workload.params, item.dtype, CPU, 0)
            cost = item.contract.cost(sample, "fwd")
            assert cost.flops > 0 and cost.bytes_written > 0, item.key


def test_on_a_gpu_cublas_stands_for_the_general_peers_and_the_autotuner_takes_part_in_its_rows_only() -> None:
    matmul = contract("matmul")
    on_gpu = [peer.name for peer in peers.declared_peers(matmul, GPU)]
    assert on_gpu == ["cublas", "torch_compile", "quack", "deep_gemm"]
    assert [peer.name for peer in peers.declared_peers(matmul, CPU)] == ["eager", "compile"]

    def competing(name: str) -> set[str]:
        return {peer.name for peer in peers.available_peers(matmul, GPU, ["cublas", "torch_compile"], case=name)}

    assert competing("square_1024") == {"cublas"}
    assert competing("square_4096") >= {"cublas"}
    assert ("torch_compile" in competing("square_4096")) == Autotuned().available()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "nn"},
        {"layout": "tn", "bias": True},
        {"bias": True, "activation": "gelu"},
        {"activation": "swiglu"},
        {"activation": "silu", "c": True},
        {"bias": True, "activation": "relu", "c": True},
    ],
)
@pytest.mark.parametrize("op", ["matmul", "bmm"])
def test_cublas_computes_the_op(op: str, options: dict[str, Any]) -> None:
    """torch's calls are the same on a CPU, with another library behind them."""
    if op == "bmm" and "bias" in options:
        options = {**options, "bias": False}
    found = contract(op)
    params = {**SIZES, **({"B": 3} if op == "bmm" else {}), **options}
    sample = found.inputs(params, torch.float32, CPU, 0)
    (cublas,) = [peer for peer in peers._library_peers(found) if peer.name == "cublas"]
    call = cublas.make(sample)
    assert call is not None
    torch.testing.assert_close(call(), found.reference(*sample.args, **sample.kwargs), rtol=1e-4, atol=1e-4)


def test_options_that_a_library_has_not_are_answered_with_none() -> None:
    matmul = contract("matmul")
    scaled = matmul.inputs({**SIZES, "alpha": 2.0}, torch.bfloat16, CPU, 0)
    wide = matmul.inputs({**SIZES, "bias": True, "out_dtype": torch.float32}, torch.bfloat16, CPU, 0)
    cublas, autotuned, *_ = PEERS
    assert cublas.make(scaled) is None
    assert cublas.make(wide) is None
    assert autotuned.make(wide) is None
    assert not Problem.of(scaled).plain


def test_the_autotuner_compiles_anew_for_new_sizes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[int] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    peer, matmul = Autotuned(), contract("matmul")
    for m in (64, 64, 32):
        sample = matmul.inputs({**SIZES, "M": m, "activation": "swiglu"}, torch.float32, CPU, 0)
        call = peer.make(sample)
        assert call is not None
        torch.testing.assert_close(call(), matmul.reference(*sample.args, **sample.kwargs), rtol=1e-4, atol=1e-4)
    assert len(resets) == 2


@pytest.mark.usefixtures("brief")
def test_a_row_of_decoding_is_timed_as_a_graph_and_one_of_training_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(case, "graph_launches", lambda *args, inference: asked.append(inference))
    matmul = contract("matmul")
    context = shared.Shared(CPU, "sustained", Effort(3, 0, 2), ["eager"], read_gb_s=1.0)
    for directions in (("fwd",), ("fwd", "bwd")):
        workload = Workload("w", SIZES, (torch.float32,), directions)
        assert case.measure(context, Case(matmul, workload, torch.float32, "fwd")).row is not None
    assert asked == [True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dsv3_576x7168_m8", "square_1024", "llama8b_qkv_wgrad", "fp8_4096x4096x7168"])
def test_a_row_on_the_gpu(name: str) -> None:
    results = run("gemm", ops=["matmul"], rows=[name], against=["cublas"], device="cuda")
    assert results.ok, results.failures
    (row,) = results.rows
    assert set(row.peers) == {"cublas"}
    assert row.l2 == "cold"
    assert bool(row.paused) == (name in ("llama8b_qkv_wgrad", "fp8_4096x4096x7168"))
