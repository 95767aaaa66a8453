"""A suite end to end on the CPU, one small case, and the faults that must fail or exclude: planted one by one."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.harness.registry import own_registry
from tests.harness.simulated_time import BENCH, READING_NS, SimulatedTime, simulate_time

from tilewright.bench import cases, peers, suite
from tilewright.bench.bandwidth import floor_calls
from tilewright.bench.cases import select
from tilewright.bench.contestants import Contestant
from tilewright.bench.measure import Effort
from tilewright.bench.measure import case as measure
from tilewright.bench.schema import missing
from tilewright.bench.statistics import Samples
from tilewright.bench.suite import run
from tilewright.bench.tables import write_table
from tilewright.bench.timing import interleave
from tilewright.dispatch import Cost, Sample, contract, register_impl
from tilewright.dispatch.backends import missing as missing_backend
from tilewright.dispatch.tables import table
from tilewright.errors import InputError, KernelMissingError, UsageError

CPU = torch.device("cpu")
SMALL = {"M": 16, "N": 64}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    """What the bench times by: a call takes a reading's time, and what it sleeps on this clock."""
    simulated = simulate_time(monkeypatch, BENCH)
    monkeypatch.setattr(measure, "perf_counter", simulated.perf_counter)
    return simulated


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rounds, no ceilings for the machine block: the tests judge structure, not speed."""
    monkeypatch.setattr(suite, "_CPU", Effort(rounds=3, graph_rounds=0, host_rounds=2))
    monkeypatch.setattr(suite, "headline", lambda device: {"read_gb_s": 1.0})
    monkeypatch.setattr(measure, "sets_for", lambda *args, **kwargs: 2)


@pytest.fixture
def planted() -> Iterator[Callable[..., None]]:
    """Registers an implementation of rms_norm under the name "cpu" for one test."""

    def plant(launch: Callable[..., None]) -> None:
        register_impl("rms_norm", backend="cpu")(launch)

    with own_registry():
        yield plant


def right(outputs: tuple[torch.Tensor, ...], x: torch.Tensor, weight: torch.Tensor, *options: Any, config: Any) -> None:
    outputs[0].copy_(contract("rms_norm").forward.reference(x, weight, *options))


def one_wrong_row(outputs: tuple[torch.Tensor, ...], *args: Any, config: Any) -> None:
    right(outputs, *args, config=config)
    outputs[0][3] += 1


def small(**changes: Any) -> Any:
    return run(
        "norm", **{"ops": ["rms_norm"], "dtype": "fp32", "case": SMALL, "against": ["eager"], "device": CPU, **changes}
    )


def test_a_row_holds_what_was_measured(planted: Callable[..., None], clock: SimulatedTime) -> None:
    def slow(outputs: tuple[torch.Tensor, ...], *args: Any, config: Any) -> None:
        clock.sleep(0.02)
        right(outputs, *args, config=config)

    planted(slow)
    lines: list[str] = []
    results = small(progress=lines.append)
    assert results.ok, results.failures
    forward, backward = results.rows
    assert (forward.op, forward.case, forward.dtype, forward.direction) == ("rms_norm", "custom", "float32", "fwd")
    assert forward.params == SMALL
    assert set(forward.impls) == {"cpu", "torch"}
    assert forward.chosen == "cpu"
    assert set(forward.peers) == {"eager"}
    assert forward.ratio_own == forward.ratio_auto
    assert forward.ratio_own is not None
    reading_us = READING_NS / 1e3  # what a stream takes on this clock, and what is read with every sample
    assert forward.impls["cpu"] == pytest.approx(20_000 + reading_us)
    assert 0 < forward.floor_us <= reading_us
    assert forward.err < 1e-6
    assert forward.eager_us > 0
    assert forward.graph_us is None
    assert backward.direction == "bwd"
    assert backward.chosen == "auto"  # our forward with torch's recomputing backward
    assert results.machine["arch"] == "cpu"
    assert any("rms_norm custom float32 fwd" in line for line in lines)


def test_one_direction_alone(planted: Callable[..., None]) -> None:
    planted(right)
    assert [row.direction for row in small(direction="bwd").rows] == ["bwd"]


def test_an_interruption_keeps_what_was_measured(planted: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    planted(right)
    whole = suite._one

    def interrupted(shared: Any, item: Any, results: Any, say: Any) -> None:
        if results.rows:
            raise KeyboardInterrupt
        whole(shared, item, results, say)

    monkeypatch.setattr(suite, "_one", interrupted)
    found = small()
    assert (len(found.rows), found.unbegun, found.ok) == (1, 1, True)


def test_rows_are_kept_one_by_one(planted: Callable[..., None]) -> None:
    planted(right)
    kept: list[tuple[int, bool]] = []
    small(keep=lambda results: kept.append((len(results.rows), "arch" in results.machine)))
    assert kept == [(1, True), (2, True)]


@pytest.mark.parametrize(
    ("us", "left"),
    [
        ({"cpu": [1_000], "torch": [60_000, 61_000], "eager": [60_000, 900]}, ["torch"]),
        ({"cpu": [30_000], "torch": [60_000], "eager": [49_000]}, []),
        ({"cpu": [90_000, 90_000], "torch": [10], "eager": [49_000]}, []),
    ],
    ids=["once was bad luck", "not dozens of times", "auto picks it"],
)
def test_who_would_cost_the_others_their_rounds_is_not_interleaved(
    us: dict[str, list[float]], left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Microseconds of each call, the first one and if it was long the second; `auto` picks "cpu"."""
    monkeypatch.setattr(measure._Case, "_wall_us", lambda self, call: us[call].pop(0))
    (item, *_) = select("norm", ops=["rms_norm"], dtype="fp32", case=SMALL, device=CPU)
    case = object.__new__(measure._Case)
    case.case, case.left_out = item, []
    remaining = case._without_slow([(Contestant(name, name != "eager", right), [name]) for name in us], "cpu")
    assert [note.name for note in case.left_out] == left
    assert {c.name for c, _ in remaining} == set(us) - set(left)


def test_what_a_budget_leaves_is_no_failure_and_another_run_takes_it(planted: Callable[..., None]) -> None:
    planted(right)
    nothing = small(budget=0.0)
    assert (nothing.rows, nothing.unbegun, nothing.ok) == ([], 2, True)
    forward, backward = small(budget=3600.0).rows
    assert [row.key for row in small(without={forward.key}).rows] == [backward.key]


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_kernel_that_cannot_be_made_here_costs_no_row(planted: Callable[..., None], direction: str) -> None:
    """`auto` goes on without it, and so does its row."""

    def absent(*args: Any, config: Any) -> None:
        raise KernelMissingError("in no cache, and no compiler is here")

    planted(absent if direction == "fwd" else right)
    if direction == "bwd":
        register_impl("rms_norm", backend="cpu", direction="bwd")(absent)
    results = small()
    assert results.ok, results.failures
    assert [row.chosen for row in results.rows] == (["torch", "torch"] if direction == "fwd" else ["cpu", "auto"])
    left_out = [(note.direction, note.name) for note in results.left_out if "in no cache" in note.reason]
    assert left_out == ([("fwd", "cpu")] if direction == "fwd" else [("bwd", "cpu")])


def test_an_implementation_with_one_wrong_row_fails_the_run_and_is_not_timed(planted: Callable[..., None]) -> None:
    planted(one_wrong_row)
    results = small()
    assert not results.ok
    assert any(note.name == "cpu" and "wrong before timing" in note.reason for note in results.failures)
    assert all("cpu" not in row.impls for row in results.rows if row.direction == "fwd")


def test_an_implementation_that_turns_wrong_while_timed_fails_the_run(planted: Callable[..., None]) -> None:
    calls = 0

    def wears_out(outputs: tuple[torch.Tensor, ...], *args: Any, config: Any) -> None:
        nonlocal calls
        calls += 1
        (right if calls < 10 else one_wrong_row)(outputs, *args, config=config)

    planted(wears_out)
    results = small()
    assert any(note.name == "cpu" and "wrong after timing" in note.reason for note in results.failures)


class WrongPeer:
    name = "wrong"

    def available(self) -> bool:
        return True

    def make(self, sample: Sample) -> Callable[[], object]:
        x, weight = sample.args
        return lambda: x * weight


class BrokenPeer(WrongPeer):
    name = "broken"

    def make(self, sample: Sample) -> Callable[[], object]:
        raise RuntimeError("no kernel image")


def test_a_wrong_or_broken_peer_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_library_peers", lambda contract: (WrongPeer(), BrokenPeer()))
    results = small(against=["eager", "wrong", "broken"])
    assert results.ok
    assert all(set(row.peers) == {"eager"} for row in results.rows)
    reasons = {note.name: note.reason for note in results.left_out if note.direction == "fwd"}
    assert "wrong before timing" in reasons["wrong"]
    assert "no kernel image" in reasons["broken"]


def test_launch_sized_cases_are_timed_as_graphs_and_a_peer_that_cannot_be_captured_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Graph capture itself needs a GPU; here a stand-in replays the calls one by one."""
    refused: list[object] = []
    ours = 1 if missing_backend("cpu", "cpu") else 2  # contestants before the first peer: cpu where it compiles, torch

    def capture(call: Callable[[], object], *, launches: int, device: torch.device) -> Callable[[], None]:
        if len(refused) == 0 and len(taken) == ours:  # eager, in the forward
            refused.append(call)
            raise RuntimeError("operation not permitted when stream is capturing")
        taken.append(call)
        return lambda: [call() for _ in range(launches)] and None

    def replays(fns: Any, *, device: torch.device, launches: int, rounds: int, evict: bool) -> Any:
        assert evict
        timed = interleave(fns, device=device, rounds=rounds, warmup=1)
        return {name: Samples([us / launches for us in samples.us]) for name, samples in timed.items()}

    taken: list[object] = []
    monkeypatch.setattr(measure, "graph_launches", lambda *args, **kwargs: 32)
    monkeypatch.setattr(measure, "capture", capture)
    monkeypatch.setattr(measure, "interleave_replays", replays)
    results = small()
    forward, backward = results.rows
    assert results.ok, results.failures
    assert forward.peers == {}
    assert forward.ratio_auto is None
    assert forward.graph_us == forward.impls[forward.chosen]
    assert forward.l2 == "cold"
    assert set(backward.peers) == {"eager"}
    assert any(note.name == "eager" and "cannot be captured" in note.reason for note in results.left_out)


def test_a_result_faster_than_its_floor_fails_the_run(monkeypatch: pytest.MonkeyPatch, clock: SimulatedTime) -> None:
    def one_gb_a_second(read: int, written: int, device: torch.device, *, sets: int) -> dict[str, Callable[[], None]]:
        streams = floor_calls(read, written, device, sets=sets)
        return dict.fromkeys(streams, partial(clock.sleep, (read + written) / 1e9))

    monkeypatch.setattr(measure, "floor_calls", one_gb_a_second)
    huge = replace(contract("rms_norm"), cost=lambda sample, direction: Cost(0, 1 << 24, 1 << 24))
    monkeypatch.setattr(cases, "known_contracts", lambda: {"rms_norm": huge})
    results = small()
    assert not results.ok
    assert any("faster than its floor" in note.reason for note in results.failures)


def test_a_workload_that_raises_is_a_failure_and_the_others_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    real = contract("rms_norm")

    def inputs(params: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
        if dtype == torch.bfloat16:
            raise RuntimeError("out of memory, planted")
        return real.inputs(SMALL, dtype, device, seed)

    monkeypatch.setattr(cases, "known_contracts", lambda: {"rms_norm": replace(real, inputs=inputs)})
    results = run("norm", against=["eager"], device=CPU)
    assert {row.dtype for row in results.rows} == {"float32"}
    assert {note.dtype for note in results.failures} == {"bfloat16"}
    assert all("out of memory" in note.reason for note in results.failures)


def test_a_declared_workload_without_a_row_is_a_failure() -> None:
    results = small()
    declared = [item.key for item in select("norm", ops=["rms_norm"], device=CPU)]
    found = missing(declared, results)
    assert {(n.op, n.case, n.dtype, n.direction) for n in found} == set(declared)
    assert missing([row.key for row in results.rows], results) == []


def test_selection_by_op_dtype_and_parameters() -> None:
    declared = contract("rms_norm").workloads
    chosen = select("norm", ops=["rms_norm"], case={"M": declared[0].params["M"]}, device=torch.device("cuda"))
    assert {item.workload.params["M"] for item in chosen} == {declared[0].params["M"]}
    assert {item.dtype for item in select("norm", ops=["rms_norm"], dtype="fp16", device=CPU)} == {torch.float16}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"suite": "nonsense"}, "no bench suite.*norm"),
        ({"ops": ["conv"]}, "no op conv.*rms_norm"),
        ({"dtype": "int8"}, "dtype 'int8'.*bfloat16"),
        ({"case": {"Q": 3}}, "no parameter Q.*M, N"),
        ({"against": ["nobody"]}, "no peer named nobody.*eager"),
    ],
)
def test_names_that_do_not_exist_are_answered_with_those_that_do(arguments: dict[str, Any], match: str) -> None:
    given = {"suite": "norm", "ops": ["rms_norm"], "against": ["eager"], "device": CPU, **arguments}
    with pytest.raises(UsageError, match=match):
        run(given.pop("suite"), **given)


def test_a_table_is_written_and_read_by_dispatch(planted: Callable[..., None], tmp_path: Path) -> None:
    planted(right)
    results = small()
    path = write_table(results, tmp_path / "table.json")
    header, rows = table.read(path)
    assert header["arch"] == "cpu"
    (forward,) = rows  # the backward has no implementation of ours here, and torch's is no choice under our forward
    assert (forward.op, forward.direction, forward.bucket) == ("rms_norm", "fwd", "M=16,N=64,plain=1")
    fastest = min(results.rows[0].impls, key=lambda name: results.rows[0].impls[name])
    assert (forward.backend, forward.numerics) == (fastest, "default")
    assert forward.torch_us == results.rows[0].impls["torch"]


def test_a_table_keeps_rows_of_the_same_machine_only(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    results = small()
    write_table(results, path)
    write_table(small(case={"M": 32, "N": 64}), path)
    assert len(table.read(path)[1]) == 2
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "versions": {"torch": "other"}}))
    write_table(results, path)
    assert {row.bucket: row.versions["torch"] for row in table.read(path)[1]} == {
        "M=16,N=64,plain=1": torch.__version__,
        "M=32,N=64,plain=1": "other",
    }
    path.write_text(json.dumps({**data, "gpu": "another"}))
    write_table(results, path)
    assert len(table.read(path)[1]) == 1


def test_a_failed_run_writes_no_table(planted: Callable[..., None], tmp_path: Path) -> None:
    planted(one_wrong_row)
    with pytest.raises(InputError, match="failures"):
        write_table(small(), tmp_path / "table.json")
    assert not (tmp_path / "table.json").exists()


@pytest.mark.gpu
def test_a_launch_sized_and_a_large_case_on_the_gpu() -> None:
    small_rows = run("norm", ops=["rms_norm"], case={"M": 4, "N": 4096}, against=["eager"], device="cuda")
    large_rows = run("norm", ops=["rms_norm"], case={"M": 8192, "N": 4096}, against=["eager"], device="cuda")
    for results in (small_rows, large_rows):
        assert results.ok, results.failures
        for row in results.rows:
            assert row.l2 == "cold"
            assert row.graph_us is not None
            assert row.ratio_auto is not None
            assert row.ratio_auto > 0.9
