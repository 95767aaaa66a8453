"""The model's own sizes, tuned: when that is proposed, what is in force, how it is timed, undone and saved."""

import importlib.util
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.assistant.planted import ceilings, prompts, tiny_llama
from tests.assistant.test_changes import identity, logits
from tests.harness.simulated_time import simulate_time
from tests.models.fake_table import planted_backend

from tilewright.assistant import apply_changes, optimize, save
from tilewright.assistant.changes import Budgeted, ProcessWide, Scene, TunedOps
from tilewright.assistant.changes.op_replacement import OpReplacement
from tilewright.assistant.observation.observe import Observation, observe
from tilewright.assistant.timing.decide import Noise
from tilewright.assistant.timing.measure import Comparison, Metric
from tilewright.assistant.workload import workload
from tilewright.dispatch import register_impl, unregister_impl
from tilewright.dispatch.tables import extra, staleness, table
from tilewright.dispatch.tables.update import update
from tilewright.errors import InputError, PatchError
from tilewright.hardware import device_info
from tilewright.models.specialise import Patched
from tilewright.tuning import Report

NEW_TOKENS = 4


class Tiles(NamedTuple):
    width: int


@pytest.fixture
def products(monkeypatch, tmp_path):
    """A backend of `matmul` on the CPU that has two configurations to choose from; yields widths that were launched."""
    launched: list[int] = []
    with planted_backend(monkeypatch, tmp_path):
        unregister_impl("matmul", backend="planted")

        @register_impl(
            "matmul",
            backend="planted",
            configure=lambda bucket, dtype: Tiles(1),
            config_type=Tiles,
            candidates=lambda bucket, dtype: (Tiles(2),),
        )
        def launch(outs: Any, a: Any, b: Any, *rest: Any, config: Tiles) -> None:
            launched.append(config.width)
            torch.mm(a, b, out=outs[0])

        yield launched


@pytest.fixture
def tuner(monkeypatch):
    """In place of the tuner: every size is fastest with a width of 2.  Yields the budgets that it was given."""
    budgets: list[float] = []

    def tune_sizes(sizes, run, budget):
        cpu = device_info("cpu")
        versions = staleness.versions("cpu")
        header = {"gpu": cpu.name, "arch": "cpu", "sm_count": 1, "versions": versions, "date": "2026-11-20"}
        rows = [
            dict(zip(("op", "direction", "bucket", "dtype", "numerics"), size.key, strict=True))
            | {"backend": "planted", "config": {"width": 2}, "us": 1.0, "noise": 0.0, "torch_us": 9.0}
            for size in sizes
        ]
        budgets.append(budget)
        update(run.report.table, header, rows)
        return Report("cpu", 0, run.report.table, tuned=rows)

    monkeypatch.setattr("tilewright.assistant.changes.tuned_ops.tune_sizes", tune_sizes)
    return budgets


def scene(model):
    work = workload(model, prompts=prompts(), new_tokens=NEW_TOKENS)
    return Scene(model, work, Observation(0, 0, "float32", []), ceilings())


def linears(model) -> int:
    return sum(isinstance(m, Patched) and isinstance(m, torch.nn.Linear) for m in model.modules())


# ------------------------------------------------------------------------------------------------------------ proposed


def test_on_a_cpu_there_is_nothing_to_tune(monkeypatch, tmp_path):
    model = tiny_llama()
    before = identity(model)
    verdict = TunedOps().applies(scene(model))
    assert not verdict.ok
    assert "nothing to tune: on cpu no op of this model has kernels of ours to choose from" in verdict.reason
    assert identity(model) == before


def test_finding_that_costs_one_prefill_and_one_step(monkeypatch):
    model, calls = tiny_llama(), []
    tiny_scene = scene(model)
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    assert not TunedOps().applies(tiny_scene).ok
    assert len(calls) <= 2


def test_sizes_with_a_choice_and_no_measurement_are_proposed(products):
    model = tiny_llama()
    before, outputs = identity(model), logits(model)
    verdict = TunedOps().applies(scene(model))
    assert verdict.ok
    assert verdict.reason.startswith("sizes without a measurement of today's versions: ")
    assert " of matmul" in verdict.reason
    assert identity(model) == before
    assert torch.equal(logits(model), outputs)


@pytest.mark.parametrize(("stale", "ok"), [(False, False), (True, True)])
def test_measured_sizes_are_not_proposed_unless_their_rows_are_stale(products, tuner, stale, ok, tmp_path):
    model = tiny_llama()
    change = TunedOps()
    change.apply(model, scene(model).work).undo()
    path = change.table
    if stale:
        data = json.loads(path.read_text())
        path.write_text(json.dumps({**data, "versions": {**data["versions"], "torch": "1.0"}}))
        table.forget()
    extra.hold(path)
    try:
        verdict = TunedOps().applies(scene(model))
    finally:
        extra.release(path)
    assert verdict.ok is ok
    assert ok or "sizes of this model were measured with today's versions" in verdict.reason


def test_the_prediction_is_the_time_beyond_the_floors_and_may_be_a_loss(products):
    model = tiny_llama()
    work = workload(model, prompts=prompts(), new_tokens=NEW_TOKENS)
    prediction = TunedOps().predict(Scene(model, work, observe(model, work), ceilings()))
    assert prediction.bound_us > 0
    assert prediction.low < 1 < prediction.high


def test_tuning_gets_its_share_of_any_budget(products, tuner):
    change = TunedOps().within(200.0)
    assert isinstance(change, Budgeted)
    assert isinstance(change, ProcessWide)
    assert change.preparation_s == pytest.approx(60.0)
    model = tiny_llama()
    change.apply(model, scene(model).work).undo()
    change.apply(model, scene(model).work).undo()
    assert tuner == [pytest.approx(60.0)], "once: then the table is there"
    assert change.preparation_s == 0.0


# ------------------------------------------------------------------------------------------------------ applied, undone


@pytest.mark.parametrize("replaced", [False, True], ids=["alone", "on top of op_replacement"])
def test_the_table_is_in_force_and_replaces_linears_until_undo(products, tuner, replaced):
    model = tiny_llama()
    work = scene(model).work
    below = OpReplacement().apply(model, work) if replaced else None
    before, outputs = identity(model), logits(model)
    assert linears(model) == 0
    applied = TunedOps().apply(model, work)
    assert linears(model) > 0
    assert "sizes tuned; replaced " in applied.detail
    products.clear()
    torch.testing.assert_close(logits(model), outputs, rtol=1e-5, atol=1e-5)
    assert set(products) == {2}
    applied.undo()
    assert extra.in_force() == ()
    assert identity(model) == before
    assert torch.equal(logits(model), outputs)
    if below is not None:
        below.undo()


def test_a_run_that_tunes_nothing_is_an_error_and_leaves_no_table(products, monkeypatch, tmp_path):
    def nothing(sizes, run, budget):
        return run.report

    monkeypatch.setattr("tilewright.assistant.changes.tuned_ops.tune_sizes", nothing)
    model = tiny_llama()
    with pytest.raises(PatchError, match="tuned_ops: nothing was tuned in 30 s"):
        TunedOps().apply(model, scene(model).work)
    assert extra.in_force() == ()


# ------------------------------------------------------------------------------------------------------- timed and kept


def optimised(monkeypatch, decision: str, sides: list[Any], allow: list[str]):
    """`optimize` whose timing is planted; `sides` gets the models of each comparison."""
    simulate_time(monkeypatch)
    gain = Metric("request", "ms", 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0)

    def compare(before, after, *_, **__):
        states = []
        for side in (before, after):
            if side.enter is not None:
                side.enter()
            states.append((side.model, len(extra.in_force()), linears(side.model) > 0))
        sides.append(states)
        return Comparison([gain], 6, 1.0)

    monkeypatch.setattr("tilewright.assistant.trial.compare", compare)
    monkeypatch.setattr("tilewright.assistant.trial.decide", lambda *_, **__: (decision, "planted"))
    monkeypatch.setattr("tilewright.assistant.trial.Noise.of", lambda control: Noise())
    model = tiny_llama()
    return optimize(model, prompts=prompts(), allow=allow, new_tokens=2, ceilings=ceilings(), budget_s=1e4)


def test_it_is_timed_in_turns_on_one_model(products, tuner, monkeypatch):
    sides: list[Any] = []
    optimisation = optimised(monkeypatch, "kept", sides, ["tuned_ops"])
    (before, *without), (after, *with_table) = sides[1]  # after the control
    assert before is after
    assert without == [0, False]
    assert with_table == [1, True]
    assert [record.name for record in optimisation.accepted] == ["tuned_ops"]
    assert tuner == [pytest.approx(3e3)]
    assert linears(optimisation.model) > 0
    assert len(extra.in_force()) == 1
    optimisation.undo()
    assert extra.in_force() == ()
    assert linears(optimisation.model) == 0


def test_what_is_not_faster_is_not_in_force(products, tuner, monkeypatch):
    optimisation = optimised(monkeypatch, "rejected", [], ["tuned_ops"])
    assert [record.name for record in optimisation.rejected] == ["tuned_ops"]
    assert extra.in_force() == ()
    assert linears(optimisation.model) == 0
    assert optimisation.table is None


def test_on_a_cpu_the_report_says_why_it_was_not_tried(monkeypatch):
    optimisation = optimised(monkeypatch, "kept", [], ["tuned_ops"])
    (record,) = optimisation.report.changes
    assert (record.name, record.decision) == ("tuned_ops", "not applicable")
    assert "nothing to tune" in record.reason


def test_the_table_is_saved_and_the_saved_file_puts_it_in_force(products, tuner, monkeypatch, tmp_path):
    optimisation = optimised(monkeypatch, "kept", [], ["tuned_ops"])
    assert optimisation.report.code.splitlines()[-1] == "apply_changes(model, ['tuned_ops'], table=\"tuned_ops.json\")"
    folder = tmp_path / "saved"
    assert {"optimized.py", "tuned_ops.json"} <= set(save(optimisation, folder))
    assert len(extra.in_force()) == 1, "on again after saving"
    optimisation.undo()
    spec = importlib.util.spec_from_file_location("optimized", folder / "optimized.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loaded = module.load("cpu")
    try:
        assert extra.in_force() == (folder / "tuned_ops.json",)
        assert linears(loaded) > 0
        products.clear()
        logits(loaded)
        assert set(products) == {2}
        assert len(tuner) == 1, "nothing is tuned again"
    finally:
        extra.release(folder / "tuned_ops.json")


def test_without_the_table_it_cannot_be_applied(products, tmp_path: Path):
    model = tiny_llama()
    with pytest.raises(InputError, match=r"tuned_ops needs table=, the tuned_ops.json that save\(\) wrote"):
        apply_changes(model, ["tuned_ops"])
    assert extra.in_force() == ()


@pytest.mark.gpu
def test_on_a_gpu_own_sizes_are_tuned_and_undone(monkeypatch, tmp_path):
    from tilewright import settings

    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    settings.reload()
    model = tiny_llama(hidden_size=1024, intermediate_size=2048).to("cuda", torch.bfloat16)
    work = workload(model, prompts=prompts(), new_tokens=NEW_TOKENS)
    before = identity(model)
    assert TunedOps().applies(Scene(model, work, Observation(0, 0, "bfloat16", []), ceilings())).ok
    applied = TunedOps(seconds=60.0).apply(model, work)
    assert "sizes tuned" in applied.detail
    applied.undo()
    assert identity(model) == before
    assert extra.in_force() == ()
    monkeypatch.undo()
    settings.reload()
