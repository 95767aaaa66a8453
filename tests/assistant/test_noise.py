"""What is called faster, slower or not judged follows from the timings alone, here injected: quiet, busy and wild ones.

A planted delay is work of the model; `take_away` is another process that has the core meanwhile.
"""

import itertools
import random

import pytest
import torch
from tests.assistant import planted
from tests.assistant.planted import DELAY_S, Planted, ceilings, prompts, slow_llama
from tests.harness.simulated_time import SimulatedTime, simulate_time
from torch import nn

from tilewright.assistant import optimize
from tilewright.assistant.observation.graph_breaks import GraphBreaks
from tilewright.assistant.timing.clocks import Reading, busy_share, judging_clock, take_turns
from tilewright.assistant.timing.decide import TOO_NOISY, Noise, decide
from tilewright.assistant.timing.measure import Comparison, Metric, Side, compare
from tilewright.assistant.timing.threads import choose_threads, restored_threads
from tilewright.assistant.workload import workload

FASTER = Planted("faster", delay_s=-DELAY_S)
SLOWER = Planted("slower", delay_s=+DELAY_S, stage=1)


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> SimulatedTime:
    return simulate_time(monkeypatch)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setattr("tilewright.assistant.timing.measure.MOST_ROUNDS", 8)
    monkeypatch.setattr("tilewright.assistant.observation.observe.graph_breaks", lambda model, run: GraphBreaks(1, 0))
    with restored_threads():
        torch.set_num_threads(1)
        yield


def metric(gain: float, low: float, high: float) -> Metric:
    return Metric("request", "ms", 10.0, 9.9, 10.1, 10 / gain, 9.9, 10.1, gain, low, high)


def control(low: float, high: float) -> Noise:
    return Noise.of(Comparison([metric((low * high) ** 0.5, low, high)], 8, 1.0))


@pytest.mark.parametrize(
    ("gain", "noise", "decision", "said"),
    [
        ((1.30, 1.28, 1.32), (0.99, 1.01), "kept", "faster beyond its interval"),
        ((0.80, 0.78, 0.82), (0.99, 1.01), "rejected", "slower"),
        ((1.03, 1.02, 1.04), (0.95, 1.01), "rejected", "two equal models differ by here (1.053x)"),
        ((0.97, 0.96, 0.98), (0.95, 1.01), "rejected", "does not exclude no gain"),
        ((1.01, 0.99, 1.03), (0.99, 1.01), "rejected", "does not exclude no gain"),
        ((1.30, 0.90, 1.70), (0.99, 1.01), "not judged", "too noisy to tell a gain from a loss"),
        ((3.00, 2.90, 3.10), (0.66, 1.29), "not judged", "two equal models differ by 0.66x to 1.29x"),
        ((0.30, 0.29, 0.31), (1.00, 37.0), "not judged", "too noisy to judge"),
    ],
)
def test_a_gain_is_held_against_the_far_end_of_the_control(gain, noise, decision, said):
    found, sentence = decide(metric(*gain), control(*noise))
    assert found == decision
    assert said in sentence
    if decision == "not judged":
        assert "slower" not in sentence
        assert "faster" not in sentence


def test_a_reading_has_the_time_of_the_wall_and_that_of_the_cpu(clock):
    def work():
        clock.sleep(0.2)
        clock.take_away(0.1)

    readings = take_turns({"work": work}, rounds=2)
    assert [round(sample.wall_us / 1e5) for sample in readings["work"]] == [3, 3]
    assert [round(sample.cpu_us / 1e5) for sample in readings["work"]] == [2, 2]
    assert busy_share(readings) == pytest.approx(1 / 3, abs=0.02)


def test_the_cpu_time_judges_where_others_take_the_core():
    assert judging_clock(0.0) == "wall"
    assert judging_clock(0.3) == "cpu"
    torch.set_num_threads(2)  # threads that wait for each other spin: their CPU time is no measure of speed
    assert judging_clock(busy_share({"x": [Reading(100.0, 10.0)]})) == "wall"


def test_what_another_process_takes_is_not_charged_to_a_model(clock):
    """One side is interrupted in every call, the other never: by the wall it is four times as slow."""
    model, other = slow_llama(), slow_llama()
    other.register_forward_pre_hook(lambda *_: clock.take_away(3 * DELAY_S))
    found = compare(Side(other), Side(model), workload(model, prompts=prompts(), new_tokens=3), seconds=1.0)
    assert found.clock == "cpu"
    assert found.busy > 0.3
    assert found.decisive.gain == pytest.approx(1.0, abs=0.05)


def run(model: nn.Module, changes: list[Planted], **settings):
    settings = {"new_tokens": 3, "budget_s": 300.0} | settings
    return optimize(model, prompts=prompts(), changes=changes, ceilings=ceilings(), **settings)


def test_on_a_busy_machine_the_same_changes_are_kept(clock):
    """Another process takes between none and four fifths of each call, at random."""
    chance = random.Random(0)
    model = slow_llama()
    model.register_forward_pre_hook(lambda *_: clock.take_away(chance.random() * 4 * DELAY_S))
    opt = run(model, [FASTER, SLOWER], budget_s=3000.0)
    assert [record.name for record in opt.accepted] == ["faster"]
    assert [record.name for record in opt.rejected] == ["slower"]
    assert {record.measured.clock for record in opt.report.changes} == {"cpu"}
    assert "CPU time" in opt.accepted[0].reason


def test_on_a_machine_too_noisy_nothing_is_called_faster_or_slower(clock):
    """Calls take 1 or 30 units, in an order that the two sides do not share: no median of a few rounds is stable."""
    units = itertools.cycle(random.Random(3).choices([1, 30], k=997))
    model = slow_llama()
    model.register_forward_pre_hook(lambda *_: clock.sleep(next(units) * DELAY_S))
    opt = run(model, [FASTER, SLOWER], budget_s=3000.0)
    report = opt.report
    assert Noise.of(report.control).limit > TOO_NOISY
    assert opt.accepted == []
    assert "too noisy to judge" in report.headline
    for record in report.changes:
        assert "too noisy" in record.reason
        assert record.decision in ("not judged", "not tried")
        assert "slower" not in record.reason


def test_a_small_gain_is_held_against_the_noise_of_the_model_as_it_runs_by_then(clock):
    """The unchanged model is noisy, as eager launches are; with `steadies` it is not, as a CUDA graph is not."""
    chance = random.Random(5)
    model = slow_llama()
    slow = model.delay_s

    def noise(running, *_):
        clock.sleep(chance.random() * 0.5 * DELAY_S if running.delay_s == slow else 0.0)

    model.register_forward_pre_hook(noise)
    steadies = Planted("steadies", delay_s=-0.75 * DELAY_S)
    opt = run(model, [steadies, Planted("small", delay_s=-0.02 * DELAY_S, stage=1)], budget_s=3000.0)
    small = opt.report.changes[1].measured.decisive
    assert 1.0 < small.gain_low <= small.gain_high < Noise.of(opt.report.control).limit
    assert [record.name for record in opt.accepted] == ["steadies", "small"]
    assert any("With steadies two equal models differ by up to 1.00" in note for note in opt.report.notes)


class FakeModel(nn.Module):
    """A forward takes `seconds[threads]`."""

    def __init__(self, clock: SimulatedTime, seconds: dict[int, float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._clock, self._seconds = clock, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._clock.sleep(self._seconds[torch.get_num_threads()])
        return x


@pytest.mark.parametrize(
    ("seconds", "count"),
    [
        ({1: 0.13, 2: 0.72, 4: 0.90}, 1),  # threads that wait for a busy core
        ({1: 0.40, 2: 0.20, 4: 0.10}, 4),  # a model that uses them
        ({1: 0.40, 2: 0.10, 4: 0.0975}, 2),  # as fast with fewer
    ],
)
def test_the_fewest_threads_that_are_as_fast_as_any_are_chosen(clock, seconds, count):
    torch.set_num_threads(4)
    model = FakeModel(clock, seconds).eval()
    chosen = choose_threads(model, workload(model, torch.zeros(2, 2)), budget_s=100.0)
    assert torch.get_num_threads() == chosen.count == count
    assert bool(chosen.note) == (count != 4)
    assert set(chosen.request_ms) == {1, 2, 4}


def test_choosing_threads_ends_after_its_share_of_the_budget(clock):
    """On a machine where two threads take fifty times as long, one round has to do."""
    torch.set_num_threads(2)
    model = FakeModel(clock, {1: 0.1, 2: 5.0}).eval()
    began = clock.now_ns
    chosen = choose_threads(model, workload(model, torch.zeros(2, 2)), budget_s=100.0)
    assert chosen.count == 1
    assert (clock.now_ns - began) / 1e9 < 6.0


def test_the_threads_are_at_the_end_what_they_were(clock):
    torch.set_num_threads(2)
    opt = run(slow_llama(), [FASTER])
    assert torch.get_num_threads() == 2
    assert opt.report.machine["torch_threads"] == 1
    assert any("set_num_threads(1)" in note for note in opt.report.notes)


def test_a_control_too_noisy_with_several_threads_is_taken_again_with_one(clock, monkeypatch):
    """Two threads wait for each other now and then, one never does."""
    monkeypatch.setattr("tilewright.assistant.loop.choose_threads", lambda model, work, budget_s: NO_CHOICE)
    torch.set_num_threads(2)
    units = itertools.cycle(random.Random(3).choices([1, 30], k=997))
    model = slow_llama()
    model.register_forward_pre_hook(
        lambda *_: clock.sleep(next(units) * DELAY_S if torch.get_num_threads() > 1 else 0.0)
    )
    opt = run(model, [FASTER], budget_s=3000.0)
    assert [record.name for record in opt.accepted] == ["faster"]
    assert not Noise.of(opt.report.control).too_noisy


class _NoChoice:
    note = ""


NO_CHOICE = _NoChoice()


class Prepared(Planted):
    """A change whose first calls take the time that it says."""

    def apply(self, model, work):
        planted.time.sleep(self.preparation_s)
        return super().apply(model, work)


class Promising(Prepared):
    def predict(self, scene):
        return super().predict(scene).__class__(1.0, 4.4, "planted")


def test_the_time_goes_to_the_largest_predicted_gains_first():
    """The compilation that may gain 4x comes last in order, and its time is kept free from the start."""
    small = [Prepared(f"small_{index}", preparation_s=20.0) for index in range(3)]
    opt = run(slow_llama(), [*small, Promising("large", delay_s=-DELAY_S, stage=5, preparation_s=50.0)], budget_s=90.0)
    decisions = {record.name: record.decision for record in opt.report.changes}
    assert decisions["large"] == "kept"
    assert list(decisions) == ["small_0", "large", "small_1", "small_2"]  # only one of the small ones fits beside it


class Outdone(Prepared):
    """Promises much of the unchanged model, and little of one that another change has made faster."""

    def predict(self, scene):
        return super().predict(scene).__class__(1.0, 1.05 if scene.in_force else 4.0, "planted")


def test_time_is_set_aside_by_what_the_kept_changes_have_left_to_gain():
    first = Promising("first", delay_s=-0.5 * DELAY_S)
    outdone, other = Outdone("outdone", stage=1, preparation_s=30.0), Prepared("other", stage=2, preparation_s=30.0)
    opt = run(slow_llama(), [first, outdone, other], budget_s=60.0)
    assert [record.name for record in opt.report.changes] == ["first", "other", "outdone"]
    assert [record.name for record in opt.report.decided("not tried")] == ["outdone"]


def test_preparation_takes_longer_on_a_busy_machine(clock):
    """Half of the time goes to others: a compilation of 30 s is not begun with 50 s left."""
    model = slow_llama()
    model.register_forward_pre_hook(lambda *_: clock.take_away(DELAY_S + 0.01))
    opt = run(model, [Planted("compiles", preparation_s=30.0)], budget_s=50.0)
    [record] = opt.report.changes
    assert record.decision == "not tried"
    assert int(record.reason.split("about ")[1].split(" s")[0]) >= 45
