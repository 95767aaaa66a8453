"""Stored ceilings: exact on their points, monotone between them, keyed by device, driver and torch."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.errors import InputError
from tilewright.hardware import ceilings, device_info
from tilewright.hardware.ceilings import Ceilings, interpolate, mix_between

SIZES = (1 << 14, 1 << 18, 1 << 22, 1 << 26)


def example() -> Ceilings:
    """Made-up points in the stored form: 1 us + bytes at a rate that falls with the share written."""
    rates = {"read": 400.0, "read2_write1": 350.0, "read1_write1": 300.0, "write": 200.0}  # bytes a ns
    grid = {"m": [1, 64, 1024], "n": [512, 4096], "k": [512, 4096]}
    us = [[[2 + m * n * k / 1e7 for k in grid["k"]] for n in grid["n"]] for m in grid["m"]]
    curve = [[512.0, 20.0], [2048.0, 200.0]]
    return Ceilings(
        device=device_info("cpu").name,
        arch="cpu",
        driver=None,
        torch_version=torch.__version__,
        date="2026-01-01",
        tf32=False,
        bandwidth={mix: [[s, 1 + s / (rate * 1e3)] for s in SIZES] for mix, rate in rates.items()},
        matmul={"bfloat16": {**grid, "us": us}},
        attention={"bfloat16": {"batch": 1, "heads": 16, "causal": {"64": curve}, "full": {"64": curve, "128": curve}}},
        launch_us=5.0,
        launch_graph_us=1.5,
        threads=torch.get_num_threads(),
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from tilewright import settings

    monkeypatch.setattr(settings, "_current", replace(settings.current(), cache_dir=tmp_path))
    return tmp_path


def test_measured_traffic_is_returned_exactly() -> None:
    c = example()
    for mix, share in ceilings.MIXES.items():
        for size, us in c.bandwidth[mix]:
            assert c.memory_us(size * (1 - share), size * share) == pytest.approx(us, rel=1e-9)


def test_measured_products_are_returned_exactly() -> None:
    c = example()
    grid = c.matmul["bfloat16"]
    for i, m in enumerate(grid["m"]):
        for j, n in enumerate(grid["n"]):
            for h, k in enumerate(grid["k"]):
                assert c.matmul_us(m, n, k, torch.bfloat16) == pytest.approx(grid["us"][i][j][h], rel=1e-9)


@given(st.integers(1, 1 << 32), st.integers(1, 1 << 32), st.sampled_from([0.0, 0.2, 1 / 3, 0.4, 0.5, 0.8, 1.0]))
def test_more_bytes_never_take_less_time(a: int, b: int, share: float) -> None:
    c = example()
    low, high = sorted((a, b))
    assert c.memory_us(low * (1 - share), low * share) <= c.memory_us(high * (1 - share), high * share) * (1 + 1e-9)


@given(st.integers(1, 1 << 16), st.integers(1, 1 << 16))
def test_more_rows_never_take_less_time(a: int, b: int) -> None:
    low, high = sorted((a, b))
    c = example()
    assert c.matmul_us(low, 2000, 1000, "bfloat16") <= c.matmul_us(high, 2000, 1000, "bfloat16") * (1 + 1e-9)


def test_beyond_the_grid_the_last_rate_holds_and_below_it_the_first_time() -> None:
    c = example()
    largest, us = c.bandwidth["read"][-1]
    assert c.memory_us(4 * largest, 0) == pytest.approx(4 * us)
    assert c.memory_us(1, 0) == pytest.approx(c.bandwidth["read"][0][1])
    assert c.memory_us(0, 0) == 0
    assert c.matmul_us(2048, 4096, 8192, "bfloat16") == pytest.approx(4 * c.matmul_us(1024, 4096, 4096, "bfloat16"))


def test_mixes_between_the_measured_ones_lie_between_them() -> None:
    us = {"read": 1.0, "read2_write1": 2.0, "read1_write1": 3.0, "write": 6.0}
    assert mix_between(us, 0.4) == pytest.approx(2.4)
    assert mix_between(us, 0.75) == pytest.approx(4.5)
    assert mix_between(us, 0.0) == 1.0
    assert mix_between(us, 1.0) == 6.0
    assert mix_between({"read1_write1": 3.0}, 0.5) == 3.0


def test_log_log_interpolation_follows_a_power_law() -> None:
    assert interpolate([[1, 2.0], [100, 200.0]], 10) == pytest.approx(20.0)


def test_attention_scales_with_work_and_never_beats_its_traffic() -> None:
    c = example()
    one = c.attention_us(1, 16, 512, 512, 64, "bfloat16", causal=True)
    assert one == pytest.approx(20.0)
    assert c.attention_us(2, 32, 512, 512, 64, "bfloat16", causal=True) == pytest.approx(4 * one)
    assert c.attention_us(1, 16, 4096, 4096, 64, "bfloat16", causal=True) == pytest.approx(4 * 200.0)
    decode = c.attention_us(64, 32, 1, 8192, 128, "bfloat16", causal=True, kv_heads=8)
    assert decode >= c.memory_us(2 * 64 * 128 * 2 * 8 * 8192, 0)


def test_a_dtype_that_was_not_measured_says_so() -> None:
    with pytest.raises(InputError, match="float16, only for bfloat16"):
        example().matmul_us(1, 1, 1, torch.float16)


def test_saved_and_loaded(cache: Path) -> None:
    path = ceilings.save(example(), "cpu")
    assert cache in path.parents
    assert ceilings.load("cpu") == example()


def test_another_number_of_threads_has_ceilings_of_its_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings.save(example(), "cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert ceilings.load("cpu") is None


def test_nothing_saved_is_none(cache: Path) -> None:
    assert ceilings.load("cpu") is None


@pytest.mark.parametrize("change", [{"torch_version": "1.0"}, {"driver": "0"}, {"device": "another"}])
def test_another_set_up_does_not_count(cache: Path, change: dict[str, object]) -> None:
    ceilings.save(replace(example(), **change), "cpu")  # type: ignore[arg-type]
    assert ceilings.load("cpu") is None


@pytest.mark.parametrize("text", ["not json", "{}", json.dumps({"schema": 99}), json.dumps({"schema": 1, "extra": 2})])
def test_an_unreadable_file_does_not_count(cache: Path, text: str) -> None:
    path = ceilings.path_for("cpu")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert ceilings.load("cpu") is None
