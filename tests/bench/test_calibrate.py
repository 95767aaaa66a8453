"""Calibration on this machine: complete, stored, ordered, and quick when asked to be."""

from dataclasses import replace
from itertools import chain, count
from pathlib import Path

import pytest
import torch

from tilewright import settings
from tilewright.bench import calibrate as module
from tilewright.bench.bandwidth import bracket, floor_calls, floor_us
from tilewright.bench.calibrate import calibrate
from tilewright.bench.statistics import Samples
from tilewright.hardware import ceilings, other_load
from tilewright.hardware.other_load import OtherLoad


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    grid = replace(
        module.CPU_QUICK,
        traffic=(1 << 16, 1 << 20),
        m=(1, 32),
        n=(64, 128),
        k=(64, 128),
        dtypes=(torch.float32,),
        s=(32, 64),
        held_traffic=(1 << 18,),
        held_matmul=((8, 96, 96),),
        held_s=(48,),
    )
    monkeypatch.setattr(module, "CPU_QUICK", grid)
    monkeypatch.setattr(settings, "_current", replace(settings.current(), cache_dir=tmp_path))


@pytest.mark.usefixtures("tiny")
def test_a_quick_calibration_predicts_and_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OtherLoad, "cores", lambda self: 0.1)
    lines: list[str] = []
    found = calibrate("cpu", quick=True, progress=lines.append)
    assert ceilings.load("cpu") == found
    assert found.quick
    assert found.launch_us > 0
    assert found.launch_graph_us is None
    assert found.memory_us(1 << 20, 0) >= found.memory_us(1 << 16, 0) > 0
    assert found.matmul_us(32, 128, 128, "float32") > 0
    assert found.attention_us(1, 4, 64, 64, 64, "float32", causal=False) > 0
    assert set(found.held_out) == {"memory", "matmul", "attention"}
    assert any("median error" in line for line in lines)


@pytest.mark.usefixtures("tiny")
def test_ceilings_of_a_busy_machine_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OtherLoad, "cores", lambda self: 0.9)
    lines: list[str] = []
    calibrate("cpu", quick=True, progress=lines.append)
    assert ceilings.load("cpu") is None  # so that the next run measures again
    assert lines[-1] == "other processes used 0.9 cores meanwhile: these ceilings are not kept"


def test_other_load_is_what_all_processes_used_without_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds in which this process used 4 s of CPU time and all of them 11."""
    readings = iter([(100.0, 50.0, 1000.0), (110.0, 54.0, 1011.0)])
    monkeypatch.setattr(other_load, "_reading", lambda: next(readings))
    assert OtherLoad().cores() == pytest.approx(0.7)


@pytest.mark.usefixtures("tiny")
def test_a_calibration_that_is_not_kept_writes_nothing() -> None:
    calibrate("cpu", quick=True, keep=False)
    assert ceilings.load("cpu") is None


def test_a_clock_that_stands_still_has_measured_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = chain([0, 0], count(10, 30))
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(module.time, "process_time_ns", lambda: next(readings))
    assert module._fastest_call(lambda: None, budget_s=0.0) == 0.03


def test_noise_cannot_make_more_bytes_cheaper() -> None:
    assert module._ascending([[1, 5.0], [2, 4.0], [3, 6.0]]) == [[1, 4.0], [2, 4.0], [3, 6.0]]


@pytest.mark.parametrize(
    ("read", "written", "mixes"),
    [
        (100, 0, ["read"]),
        (0, 100, ["write"]),
        (50, 50, ["read1_write1"]),
        (1000, 992, ["read1_write1"]),  # a small weight beside x and y changes nothing
        (200, 100, ["read2_write1"]),
        (300, 200, ["read2_write1", "read1_write1"]),
        (20, 80, ["read1_write1", "write"]),
    ],
)
def test_the_floor_is_measured_at_the_mixes_around(read: int, written: int, mixes: list[str]) -> None:
    assert bracket(read, written) == mixes


def test_the_floor_takes_the_fastest_mover_of_each_mix() -> None:
    timed = {
        "read2_write1/torch": Samples([10.0]),
        "read2_write1/triton1024": Samples([8.0]),
        "read1_write1/torch": Samples([16.0]),
    }
    assert floor_us(timed, 300, 200) == pytest.approx(8 + (0.4 - 1 / 3) / (0.5 - 1 / 3) * 8)


def test_the_floor_of_a_shared_machine_is_its_undisturbed_sample() -> None:
    timed = {"read/torch": Samples([50.0, 10.0, 40.0])}
    assert floor_us(timed, 100, 0) == 40.0
    assert floor_us(timed, 100, 0, shared=True) == 10.0


def test_streams_move_what_they_say() -> None:
    calls = floor_calls(2 << 20, 1 << 20, torch.device("cpu"), sets=2)
    assert list(calls) == ["read2_write1/torch"]
    out = calls["read2_write1/torch"]()
    assert isinstance(out, torch.Tensor)
    assert out.numel() * out.element_size() == 1 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("mix", list(ceilings.MIXES))
def test_triton_streams_are_right(mix: str) -> None:
    from tilewright.bench.stream_kernel import stream

    reads, writes = {"read": (1, 0), "read2_write1": (2, 1), "read1_write1": (1, 1), "write": (0, 1)}[mix]
    n = 10_000
    arrays = [torch.randint(-9, 9, (n,), dtype=torch.int32, device="cuda") for _ in range(reads)]
    out = torch.full((n,), -1, dtype=torch.int32, device="cuda")
    stream(arrays, out, writes=writes, n=n, block=1024)
    expected = sum(arrays, torch.ones(n, dtype=torch.int32, device="cuda"))
    if writes:
        assert torch.equal(out, expected)
    else:
        assert int(out[0]) == int(expected[:1024].sum())
