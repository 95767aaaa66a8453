"""The interleaved timer: order, batches, leads, and seeing what is slower. A scripted clock stands in for a GPU."""

import gc
import time
from collections.abc import Callable

import pytest
import torch
from tests.harness.simulated_time import READING_NS, SimulatedTime, simulate_time

from tilewright.bench import timing
from tilewright.bench.clock import clock_for
from tilewright.bench.graph import capture
from tilewright.bench.rotation import rotate, sets_for
from tilewright.bench.timing import Plan, host_us, interleave, lead_for, paired_ratio, run_rounds
from tilewright.errors import InputError


class Scripted:
    """A device whose time only moves when told to; counts leads."""

    def __init__(self) -> None:
        self.now = 0.0
        self.leads: list[float] = []

    def mark(self) -> float:
        return self.now

    def elapsed_us(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        pass

    def lead(self, us: float) -> None:
        self.leads.append(us)
        self.now += us

    def takes(self, us: float) -> Callable[[], None]:
        def call() -> None:
            self.now += us

        return call


def test_rounds_alternate_direction() -> None:
    order: list[str] = []
    clock = Scripted()
    plans = {name: Plan(lambda name=name: order.append(name), 1, 0.0) for name in "abc"}
    run_rounds(plans, clock, rounds=4)
    assert "".join(order) == "abccbaabccba"


def test_a_sample_is_divided_by_calls_and_units_and_excludes_lead_and_preparation() -> None:
    clock = Scripted()
    plans = {"graph": Plan(clock.takes(100.0), calls=4, lead_us=70.0, units=20)}
    timed = run_rounds(plans, clock, rounds=3, before=clock.takes(1000.0))
    assert timed["graph"].us == [5.0, 5.0, 5.0]
    assert clock.leads == [70.0] * 3


def test_a_pause_leads_long_enough_for_a_host_that_slept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It launches a kernel 100 to 350 us late: without the lead that would count as the kernel's time."""
    monkeypatch.setattr(timing, "PAUSE_S", 0.0)
    clock = Scripted()
    plans = {"short": Plan(clock.takes(50.0), 1, lead_us=12.5), "long": Plan(clock.takes(50.0), 1, lead_us=9000.0)}
    run_rounds(plans, clock, rounds=1, timing="paused")
    assert clock.leads[0] >= 1000.0
    assert clock.leads[1] == 9000.0


@pytest.mark.parametrize(
    ("host", "device", "calls", "lead"),
    [
        (10.0, 400.0, 1, 12.5),  # device-bound: only the first enqueue must be covered
        (40.0, 4.0, 100, 1.25 * (40 + 100 * 36)),  # host-bound: the device would wait 36 us after every call
    ],
)
def test_the_lead_covers_what_the_host_falls_behind(host: float, device: float, calls: int, lead: float) -> None:
    assert lead_for(host, device, calls) == pytest.approx(lead)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    return simulate_time(monkeypatch, ["tilewright.bench.timing", "tilewright.bench.clock"])


def test_a_planted_slow_function_is_found(clock: SimulatedTime) -> None:
    fns = {"once": lambda: clock.sleep(0.1), "thrice": lambda: clock.sleep(0.3)}
    timed = interleave(fns, device="cpu", rounds=15)
    ratio = paired_ratio(timed["thrice"], timed["once"])
    assert ratio.low == ratio.value == ratio.high == pytest.approx(301 / 101)  # reading the clock takes 1 ms


def test_sleeping_is_measured_in_microseconds(clock: SimulatedTime) -> None:
    timed = interleave({"sleep": lambda: clock.sleep(0.002)}, device="cpu", rounds=5, warmup=1)
    assert timed["sleep"].us == [2000 + READING_NS / 1e3] * 5


def test_short_calls_are_batched_into_long_samples() -> None:
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    interleave({"count": count}, device="cpu", rounds=4, warmup=0, sample_us=1e9)
    assert calls > 4 * timing._MAX_CALLS


def test_paused_rests_before_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(timing.time, "sleep", naps.append)
    interleave({"a": lambda: None, "b": lambda: None}, device="cpu", timing="paused", rounds=3, sample_us=1)
    assert naps == [timing.PAUSE_S] * 6


def test_the_collector_is_off_while_timing_and_restored() -> None:
    seen: list[bool] = []
    interleave({"a": lambda: seen.append(gc.isenabled())}, device="cpu", rounds=1, warmup=1, sample_us=1)
    assert not any(seen)
    assert gc.isenabled()


def test_host_time_on_a_cpu_is_the_call(clock: SimulatedTime) -> None:
    reading_us = READING_NS / 1e3  # the second of two readings counts as part of the ten calls
    assert host_us(lambda: clock.sleep(0.001), device="cpu", rounds=3, calls=10).us == [1000 + reading_us / 10] * 3


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"fns": {}}, "no callables"),
        ({"rounds": 0}, "rounds >= 1"),
        ({"timing": "fast"}, "sustained"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], match: str) -> None:
    given = {"fns": {"a": lambda: None}, "device": "cpu", **arguments}
    fns = given.pop("fns")
    with pytest.raises(InputError, match=match):
        interleave(fns, **given)  # type: ignore[arg-type]


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(InputError, match="CUDA"):
        capture(lambda: None, launches=20, device="cpu")


def test_rotation_takes_turns_and_holds_one_result_a_set() -> None:
    x = torch.zeros(4)
    turn = rotate([lambda: x + 1, lambda: x + 2])
    first, second = turn(), turn()
    third = turn()
    assert [int(t[0]) for t in (first, second, third)] == [1, 2, 1]  # type: ignore[index]
    assert third.data_ptr() != second.data_ptr()  # type: ignore[attr-defined]


def test_enough_sets_for_a_cold_cache() -> None:
    from tilewright.hardware import device_info

    l2 = device_info("cpu").l2_bytes
    assert sets_for(3 * l2, "cpu") == 2
    assert sets_for(l2 // 4, "cpu") * (l2 // 4) > 2 * l2
    assert sets_for(1, "cpu", at_most=7) == 7


@pytest.mark.gpu
def test_device_time_leaves_host_gaps_out() -> None:
    x = torch.ones(1 << 20, device="cuda")

    def slow_host() -> None:
        time.sleep(0.0005)
        x.add_(1)

    timed = interleave({"slow host": slow_host, "add": lambda: x.add_(1)}, device="cuda", rounds=9, sample_us=50)
    assert timed["slow host"].median < 100  # the host alone takes 500 us a call
    assert clock_for(torch.device("cuda")).elapsed_us is not None


@pytest.mark.gpu
def test_graph_time_of_a_forward_and_of_a_backward() -> None:
    from tilewright.bench.graph import interleave_graphs

    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.randn(64, 4096, device="cuda", requires_grad=True)
        y = torch.nn.functional.silu(x)
        dy = torch.randn_like(y)
        fns = {
            "add": lambda: x.detach() + 1,
            "backward": lambda: torch.autograd.grad(y, x, dy, retain_graph=True),
        }
        timed = interleave_graphs(fns, device="cuda", launches=64, rounds=5)
    assert 0.5 < timed["add"].median < 20
    assert 0.5 < timed["backward"].median < 40
