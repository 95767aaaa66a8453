"""The tuner's parts alone: search spaces, small problems, decisions, watched workers."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tilewright.bench.statistics import Samples, paired_ratio
from tilewright.dispatch import contracts, implementations
from tilewright.dispatch.tables.configs import from_row, to_row
from tilewright.tuning.decide import decide
from tilewright.tuning.problem import Problem, bucket_of, fake_call, shrink_rows
from tilewright.tuning.search import Effort, Race, Track
from tilewright.tuning.space import Space, Trial, space
from tilewright.tuning.subject import Subject
from tilewright.tuning.watched import Watched, WorkerFailed, WorkerLost


def problem(op: str, direction: str = "fwd", name: str | None = None) -> Problem:
    """A declared GPU workload, planned for a GPU that need not be here."""
    import tilewright.ops  # noqa: F401 - binds every contract

    workloads = contracts()[op].workloads
    workload = next(w for w in workloads if name in (None, w.name))
    dtype = workload.dtypes[0] if op == "moe_align" else torch.bfloat16  # which takes ids
    return Problem(op, direction, workload.params, dtype, "cuda", 0, ("tilewright.ops",))


def every_space():
    """(raw op, implementation, bucket) of every workload, each once."""
    import tilewright.ops  # noqa: F401 - binds every contract

    for contract in contracts().values():
        for raw in contract.raw_ops:
            found, seen = implementations(raw.op, raw.direction), set()
            for workload in contract.workloads:
                if raw.direction in workload.directions:
                    made = problem(contract.name, raw.direction, workload.name)
                    with fake_call(made) as call:
                        bucket = raw.bucket_of(call.args, "default")
                    if bucket not in seen:
                        yield from ((raw, each, bucket) for each in found.values() if each.candidates)
                    seen.add(bucket)


def test_every_declared_space_holds_the_default_and_survives_json(exhaustive):
    seen, written = set(), set()
    for raw, implementation, bucket in every_space():
        for dtype in (torch.bfloat16, torch.float32)[: 1 + exhaustive]:
            if implementation.configure(bucket, dtype) is None:
                continue  # refused for these sizes
            configs = implementation.space(bucket, dtype)
            assert configs[0] == implementation.configure(bucket, dtype)
            assert len(set(configs)) == len(configs)
            assert len(configs) <= 64, f"{raw.key} {bucket}: {len(configs)} candidates take too long"
            known = replace(implementation, configure=None, candidates=lambda *_, made=configs: made)
            new = [config for config in configs if (type(config), config) not in written]
            for config in new:
                row = json.loads(json.dumps(to_row(config, implementation.kernel_of(config).kernel)))
                assert from_row(known, row, bucket, dtype) == config
            written |= {(type(config), config) for config in new}
        seen.add((raw.key, implementation.backend))
    forwards = [contract.forward for contract in contracts().values()]
    triton_ops = {raw.key for raw in forwards if any(kernel.startswith("triton.") for kernel in raw.kernels)}
    assert {key for key, backend in seen if backend == "triton"} >= triton_ops


def test_a_trial_names_its_kernel(cache_folder):
    for trial in space(problem("softmax"), "exhaustive", "triton").trials:
        named = trial.backend == "triton"
        assert trial.kernel == ("triton.softmax" if named else "")
        assert (trial.row or {}).get("kernel", "") == trial.kernel
        assert ("kernel=triton.softmax" in str(trial)) is named


def test_the_present_choice_is_tried_first_and_a_random_order_is_repeatable(cache_folder):
    subject = problem("softmax", "bwd")
    plain = space(subject, "exhaustive", "triton")
    shuffled = [space(subject, "random", "triton") for _ in range(2)]
    assert plain.present is plain.first[0]
    assert plain.present.default
    order = [[trial.config for trial in each.rest] for each in (plain, *shuffled)]
    assert order[1] == order[2] != order[0]
    assert set(order[0]) == set(order[1])
    assert "torch" not in {trial.backend for trial in plain.trials}, "a table cannot ask for autograd"


@pytest.mark.parametrize(
    ("op", "workload", "changed"),
    [
        ("rms_norm", "llama8b_train", {"M": 37}),
        ("softmax", "decode_1", {}),
        ("silu_and_mul", "llama70b_train", {"M": 37}),
        ("apply_rope", "llama8b_1x8k", {"S": 37}),
        ("apply_rope", "llama8b_packed", {"T": 37}),
    ],
)
def test_a_small_problem_has_few_rows_and_the_same_width(op, workload, changed):
    whole = problem(op, name=workload)
    small = shrink_rows(whole)
    assert {k: v for k, v in small.params.items() if whole.params[k] != v and k != "positions"} == changed
    assert bucket_of(small, "batch_invariant") == bucket_of(whole, "batch_invariant")


def decided(present_us, best_us, min_gain=0.03):
    present, best, torchs = Trial("triton", None), Trial("cutile", None), Trial("torch", None)
    samples = {present: Samples(present_us), best: Samples(best_us), torchs: Samples([900.0] * len(best_us))}
    race = Race(best, paired_ratio(samples[present], samples[best]), samples)
    case = SimpleNamespace(contract=SimpleNamespace(name="op"), direction="fwd", workload=SimpleNamespace(name="w"))
    return decide(
        case, Space("M=1", "bfloat16", present, "", (present,), (best,)), race, samples[torchs], min_gain, 1.0
    )


def test_a_gain_beyond_threshold_and_noise_changes_the_choice():
    tuned = decided([100.0] * 9, [90.0] * 9)
    assert tuned.changed
    assert tuned.row["backend"] == "cutile"
    assert tuned.row["runner_up"] == {"backend": "triton", "config": None, "us": 100.0}
    assert tuned.row["torch_us"] == 900.0


@pytest.mark.parametrize(
    ("best", "note"),
    [
        ([98.0] * 9, "gains less than 3%"),
        ([60.0, 140.0, 61.0, 139.0, 62.0, 141.0, 63.0, 142.0, 64.0], "not faster beyond the noise"),
    ],
)
def test_a_small_or_doubtful_gain_does_not(best, note):
    tuned = decided([100.0] * 9, best)
    assert not tuned.changed
    assert tuned.row["backend"] == "triton"
    assert note in tuned.note


def test_a_present_choice_that_is_out_is_replaced_whatever_the_gain():
    present, best = Trial("triton", None, reason="wrong: relative error 1"), Trial("cutile", None)
    race = Race(best, None, {best: Samples([100.0] * 9)})
    case = SimpleNamespace(contract=SimpleNamespace(name="op"), direction="bwd", workload=SimpleNamespace(name="w"))
    tuned = decide(case, Space("M=1", "bfloat16", present, "", (present,), (best,)), race, None, 0.03, 1.0)
    assert tuned.changed
    assert tuned.note == "the present choice is out: wrong: relative error 1"


def test_a_worker_is_replaced_when_it_is_lost(fake_op, cache_folder):
    subject = Problem(
        fake_op.NAME, "fwd", {"M": 4, "N": 8}, torch.float32, "cpu", 0, ("tilewright.ops", "tests.tuning.fake_op")
    )
    worker = Watched()
    try:
        with pytest.raises(WorkerFailed, match="AttributeError"):
            worker.ask("no_such_request", timeout=30)
        assert worker.alive
        worker.ask("prepare", subject, timeout=30)
        assert worker.ask("check", "cpu", fake_op.FAST, timeout=30) is None
        with pytest.raises(WorkerLost, match="crashed: SIGSEGV"):
            worker.ask("check", "cpu", fake_op.Config("crashes"), timeout=30)
        assert not worker.alive
        worker.ask("prepare", subject, timeout=30)
        assert worker.generation == 2
    finally:
        worker.close()


class Mined:
    """A bench worker that a candidate before has damaged: it dies of the next request, and starts anew."""

    def __init__(self, deaths):
        self.alive, self.generation, self.deaths, self.checks = True, 1, deaths, 0

    def ask(self, request, *arguments, timeout):
        if not self.alive:
            self.alive, self.generation = True, self.generation + 1
        if request == "prepare":
            return
        self.checks += 1
        if self.checks <= self.deaths:
            self.alive = False
            raise WorkerLost("crashed: SIGSEGV")
        return


@pytest.mark.parametrize(("deaths", "reason", "checks"), [(0, None, 1), (1, None, 2), (2, "crashed: SIGSEGV", 2)])
def test_a_crash_counts_in_a_new_worker_only(deaths, reason, checks):
    bench = Mined(deaths)
    track = Track(None, None, bench, Effort(1, 1, 1.0))
    assert track._check(Trial("cpu", None)) == reason
    assert bench.checks == checks


def test_a_row_of_the_timed_problem_is_judged_by_its_own_size(fake_op):
    """A row of zeros beside one 1000 times larger is 0.1 % of the whole; the small problem lacks it."""
    params = {"M": 64, "N": 4096, "loud": 1000}
    subject = Subject(Problem(fake_op.NAME, "fwd", params, torch.bfloat16, "cpu", 0, ("tests.tuning.fake_op",)))
    assert subject.check("cpu", fake_op.FAST) is None
    reason = subject.check("cpu", fake_op.Config("quiet_row"))
    assert reason is not None
    assert "row 50 off by" in reason


def test_a_worker_imports_nothing_from_the_current_folder(cache_folder, tmp_path, monkeypatch):
    """The parent does not either: its own path holds no such entry."""
    (tmp_path / "ctypes.py").write_text("raise SystemExit('a file of the current folder was imported')")
    monkeypatch.chdir(tmp_path)
    worker = Watched()
    try:
        with pytest.raises(WorkerFailed, match="AttributeError"):  # it has started, and knows no such request
            worker.ask("no_such_request", timeout=30)
    finally:
        worker.close()
