"""The loop keeps what is faster and exact, rejects the rest in words, and undoes everything it rejects."""

import copy
import dataclasses

import pytest
import torch
from tests.assistant.planted import DELAY_S, Planted, _sleep, ceilings, prompts, slow_llama, tiny_llama
from tests.harness.simulated_time import SimulatedTime, simulate_time
from torch import nn

from tilewright.assistant import Report, analyze, optimize
from tilewright.assistant.changes.cast import BF16, Cast
from tilewright.assistant.observation.graph_breaks import GraphBreaks
from tilewright.assistant.timing.measure import FEWEST_ROUNDS, Side, compare
from tilewright.assistant.trial import Trials
from tilewright.assistant.workload import workload
from tilewright.errors import InputError

FASTER = Planted("faster", delay_s=-DELAY_S)
SLOWER = Planted("slower", delay_s=+DELAY_S, stage=1)
INACCURATE = Planted("faster_but_wrong", delay_s=-DELAY_S, error=0.05)
SETTINGS = {"new_tokens": 3, "budget_s": 300.0}


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> SimulatedTime:
    """A forward takes what it sleeps and nothing else: gains are known in advance, whatever else the machine does."""
    return simulate_time(monkeypatch)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """One thread, few rounds, and no graph-break count (it takes seconds and has its own test)."""
    monkeypatch.setattr("tilewright.assistant.timing.measure.MOST_ROUNDS", 7)
    monkeypatch.setattr("tilewright.assistant.observation.observe.graph_breaks", lambda model, run: GraphBreaks(1, 0))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(model, changes, **settings):
    return optimize(model, prompts=prompts(), changes=changes, ceilings=ceilings(), **SETTINGS | settings)


def test_a_faster_exact_change_is_kept_with_its_interval():
    model = slow_llama()
    opt = run(model, [FASTER])
    [record] = opt.accepted
    gain = record.measured.decisive
    assert opt.model is model
    assert model.delay_s == 0.0
    assert gain.name == "request"
    assert 1.0 < gain.gain_low <= gain.gain <= gain.gain_high
    assert f"{gain.gain_low:.3f} to {gain.gain_high:.3f}" in record.reason
    assert opt.report.totals.decisive.gain_low > 1.0
    assert opt.report.after is not None
    opt.undo()
    assert model.delay_s == DELAY_S


def test_a_slower_change_is_rejected_and_undone():
    model = slow_llama()
    opt = run(model, [SLOWER])
    [record] = opt.rejected
    assert "slower" in record.reason
    assert record.measured.decisive.gain_high < 1.0
    assert model.delay_s == DELAY_S
    assert opt.accepted == []
    assert opt.report.totals is None


def test_a_faster_inaccurate_change_is_rejected_before_it_is_timed():
    opt = run(slow_llama(), [INACCURATE])
    [record] = opt.rejected
    assert "logit error" in record.reason
    assert record.measured is None
    assert record.accuracy.error > record.accuracy.error_limit
    assert opt.model.delay_s == DELAY_S


def test_a_change_without_effect_is_not_kept():
    opt = run(slow_llama(), [Planted("nothing")])
    assert opt.accepted == []
    assert opt.rejected[0].measured.decisive.gain == 1.0


def test_later_changes_build_on_kept_ones():
    opt = run(slow_llama(), [FASTER, SLOWER])
    assert [record.name for record in opt.accepted] == ["faster"]
    assert [record.name for record in opt.rejected] == ["slower"]
    before, after = (c.measured.decisive for c in opt.report.changes)
    assert after.before < 0.7 * before.before  # the second was timed against the model with the first


def test_a_change_that_raises_is_rejected_in_words():
    class Broken(Planted):
        def apply(self, model, work):
            raise RuntimeError("there is no '/usr/bin/g++' or /opt/a-b/c\nand this line is not shown")

    opt = run(slow_llama(), [Broken("broken")])
    [record] = opt.rejected
    assert record.reason == "it failed: RuntimeError: there is no 'g++' or c"  # a report names no folder


def test_a_change_that_fails_in_its_first_calls_is_undone():
    class FailsLater(Planted):
        def apply(self, model, work):
            applied = super().apply(model, work)
            model.lm_head.register_forward_pre_hook(_raise)
            return applied

    model = slow_llama()
    opt = run(model, [FailsLater("fails_later", delay_s=1.0)])
    assert "ZeroDivisionError" in opt.rejected[0].reason
    assert model.delay_s == DELAY_S
    model(prompts()[0][None])  # the model itself never carried the broken hook


def _raise(*_):
    raise ZeroDivisionError("planted")


def test_without_room_for_a_copy_changes_are_switched_in_place(monkeypatch):
    monkeypatch.setattr(Trials, "_copy", lambda self, model: self.main)
    model = slow_llama()
    opt = run(model, [FASTER, SLOWER])
    assert [record.name for record in opt.accepted] == ["faster"]
    assert opt.report.totals.decisive.gain_low > 1.0
    assert model.delay_s == 0.0
    opt.undo()
    assert model.delay_s == DELAY_S


def test_when_the_budget_is_used_up_changes_are_not_tried():
    opt = run(slow_llama(), [FASTER], budget_s=0.0)
    [record] = opt.report.changes
    assert record.decision == "not tried"
    assert "budget" in record.reason
    assert opt.model.delay_s == DELAY_S
    assert "No change was tried" in opt.report.headline


def test_a_compilation_is_not_begun_without_the_time_for_it():
    opt = run(slow_llama(), [FASTER, Planted("compiles", stage=1, preparation_s=1000.0)], budget_s=60.0)
    faster, compiles = opt.report.changes
    assert faster.decision == "kept"
    assert compiles.decision == "not tried"
    assert "its preparation takes about 10" in compiles.reason


def test_a_machine_that_slows_down_ends_a_comparison_by_the_clock(clock):
    model = tiny_llama()
    work = workload(model, prompts=prompts(), new_tokens=2)
    calls = []

    def slower_every_time(*_):
        calls.append(None)
        clock.sleep(0.001 * len(calls))

    slow = copy.deepcopy(model)
    slow.register_forward_pre_hook(slower_every_time)
    found = compare(Side(model), Side(slow), work, seconds=1.0)
    assert FEWEST_ROUNDS <= found.rounds < 30
    assert found.seconds < 4.0


def test_analyze_changes_nothing():
    model = tiny_llama()
    state = copy.deepcopy(model.state_dict())
    attributes = {path: set(module.__dict__) for path, module in model.named_modules()}
    classes = {path: type(module) for path, module in model.named_modules()}
    report = analyze(model, prompts=prompts(), new_tokens=4, ceilings=ceilings())
    assert report.totals is None
    assert report.control is None
    assert report.decided("proposed")
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert {path: set(module.__dict__) for path, module in model.named_modules()} == attributes
    assert {path: type(module) for path, module in model.named_modules()} == classes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_plain_module_is_timed_on_its_forward():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    report = optimize(model, torch.randn(4, 32), allow=["bf16"], ceilings=ceilings(), budget_s=60.0).report
    assert report.control.decisive.name == "forward"
    [record] = report.changes
    assert record.decision == "rejected"
    assert "logit error" in record.reason


class InHalf(Cast):
    """bf16 that takes no time at all: a planted delay is gone with it."""

    def apply(self, model, work):
        applied = super().apply(model, work)
        model.delay_s, own = 0.0, applied.undo

        def undo():
            model.delay_s = DELAY_S
            own()

        applied.undo = undo
        return applied


def test_a_cast_that_would_pay_is_timed_and_offered_by_name():
    half = InHalf(**{field.name: getattr(BF16, field.name) for field in dataclasses.fields(BF16)})
    model = slow_llama()
    [record] = run(model, [half]).report.changes
    assert record.decision == "rejected"
    assert record.measured.decisive.gain_low > 1.0
    assert "It would pay: request" in record.reason
    assert "Top-1 agreement" in record.reason
    assert "--accept-dtype bf16" in record.reason
    assert model.delay_s == DELAY_S


def test_an_encoders_cast_is_judged_by_the_cosine_of_its_outputs():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8)).eval()
    model.delay_s = DELAY_S
    model.register_forward_pre_hook(_sleep)
    half = InHalf(**{field.name: getattr(BF16, field.name) for field in dataclasses.fields(BF16)})
    settings = {"changes": [half], "ceilings": ceilings(), "budget_s": 60.0}
    [record] = optimize(model, torch.randn(4, 32), **settings).report.changes
    assert record.decision == "rejected"
    assert "Cosine of its outputs at least 0.99" in record.reason


def test_bf16_passes_the_gate_when_its_accuracy_is_accepted():
    opt = optimize(
        tiny_llama(),
        prompts=prompts(),
        allow=["bf16"],
        accept_dtype=torch.bfloat16,
        ceilings=ceilings(),
        **SETTINGS,
    )
    [record] = opt.report.changes
    assert record.accuracy.passed
    assert record.measured is not None
    assert record.accuracy.error == pytest.approx(record.accuracy.own_error)


def test_progress_is_told():
    lines = []
    analyze(tiny_llama(), prompts=prompts(), new_tokens=2, ceilings=ceilings(), progress=lines.append)
    assert any("profiling" in line for line in lines)


def test_throughput_counts_tokens_of_a_batch():
    opt = run(slow_llama(), [FASTER], goal="throughput", batch_size=3)
    rate, request = opt.report.control.metrics[:2]
    assert rate.unit == "tokens/s"
    assert rate.before == pytest.approx(3 * 3 * 1e3 / request.before)
    assert opt.report.workload["example_shape"][0] == 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"goal": "speed"}, "goal='speed'"),
        ({"allow": ["turbo"]}, "turbo"),
        ({"prompts": ["text"]}, "tokenizer"),
        ({"prompts": None}, "nothing to run"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(settings, said):
    with pytest.raises(InputError, match=said):
        optimize(tiny_llama(), **{"prompts": prompts(), "ceilings": ceilings(), **settings})


def test_training_mode_is_refused():
    with pytest.raises(InputError, match=r"model\.eval"):
        analyze(tiny_llama().train(), prompts=prompts(), ceilings=ceilings())


def test_the_report_survives_json():
    report = run(slow_llama(), [FASTER, INACCURATE]).report
    again = Report.from_json(report.to_json())
    assert again.to_json() == report.to_json()
    kept, expected = again.decided("kept")[0], report.decided("kept")[0]
    assert kept.measured.decisive.gain == pytest.approx(expected.measured.decisive.gain, rel=1e-5)
