"""DeepGEMM's test tools and sizes, as `tilewright.compat.deep_gemm` gives them."""

import importlib
import json
import os
from typing import Any

import pytest
import torch
from tests.harness.simulated_time import READING_NS, simulate_time

from tilewright.compat.deep_gemm import align, ceil_div, get_tma_aligned_size
from tilewright.compat.deep_gemm.testing import bench, bench_kineto, calc_diff, count_bytes
from tilewright.errors import InputError


def test_equal_tensors_have_no_difference():
    x = torch.randn(100)
    assert calc_diff(x, x) == pytest.approx(0.0, abs=1e-15)
    assert calc_diff(torch.zeros(4), torch.zeros(4)) == 0


def test_difference_is_half_the_squared_relative_error():
    x = torch.randn(10_000, dtype=torch.float64)
    assert calc_diff(x, 1.01 * x).item() == pytest.approx(0.01**2 / 2, rel=0.02)
    assert calc_diff(x, -x) == 2
    assert calc_diff(x, torch.zeros_like(x)) == 1


def test_difference_is_taken_in_float64():
    x = torch.full((64,), 6e4, dtype=torch.float16)  # its square is beyond float16 and the sum's 1 is beyond bf16
    assert calc_diff(x, x).dtype == torch.float64
    assert calc_diff(x, x) < 1e-12


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_passes_no_tolerance(value):
    x = torch.ones(8)
    y = x.clone()
    y[3] = value
    assert not calc_diff(y, x) < 1e9
    assert not calc_diff(y, y) < 1e9


def test_shapes_are_not_broadcast():
    with pytest.raises(InputError, match=r"x is \(4, 1\), y is \(4,\)"):
        calc_diff(torch.ones(4, 1), torch.ones(4))


def test_bytes_are_counted_in_nested_sequences():
    x, scale = torch.empty(3, 5, dtype=torch.bfloat16), torch.empty(7)
    assert count_bytes(x, None, (x, [scale])) == 30 + 30 + 28
    assert count_bytes() == 0


@pytest.mark.parametrize(("x", "y", "expected"), [(0, 8, 0), (1, 8, 1), (8, 8, 1), (9, 8, 2)])
def test_ceil_div_and_align(x, y, expected):
    assert ceil_div(x, y) == expected
    assert align(x, y) == expected * y


@pytest.mark.parametrize(("x", "size", "expected"), [(1, 4, 4), (4, 4, 4), (5, 4, 8), (9, 2, 16), (17, 1, 32)])
def test_aligned_sizes_fill_16_bytes(x, size, expected):
    assert get_tma_aligned_size(x, size) == expected


def test_bench_gives_seconds_a_call(monkeypatch):
    clock = simulate_time(monkeypatch, ["tilewright.compat.deep_gemm.testing.bench"])
    calls = []

    def sleep():
        calls.append(1)
        clock.sleep(0.01)

    seconds = bench(sleep, num_warmups=2, num_tests=5)
    assert seconds == pytest.approx(0.01 + READING_NS / 1e9 / 5)
    assert len(calls) == 7


# On a CPU the profiler sees torch's operators; the road from names to seconds is the same.

x, w = torch.randn(64, 64), torch.randn(64, 64)
cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="names of torch's operators on a CPU")


@pytest.fixture
def profiled(monkeypatch) -> list[Any]:
    """The profiles that `bench_kineto` takes, the last one at the end."""
    module = importlib.import_module("tilewright.compat.deep_gemm.testing.bench")
    taken, own = [], module._profiled

    def keep(*arguments):
        taken.append(own(*arguments))
        return taken[-1]

    monkeypatch.setattr(module, "_profiled", keep)
    return taken


def seen(profiled: list[Any], name: str) -> tuple[float, int]:
    """Seconds and calls of operators whose name contains `name`, in the last profile."""
    found = [e for e in profiled[-1].events() if name in e.name and not e.is_user_annotation]
    return sum(event.self_cpu_time_total for event in found) / 1e6, len(found)


@cpu
def test_kineto_gives_seconds_by_name(profiled):
    calls = []

    def call():
        calls.append(1)
        return torch.softmax(x @ w, -1)

    times = bench_kineto(call, ("aten::mm", "aten::_softmax"), num_tests=4, flush_l2=False)
    assert isinstance(times, tuple)
    assert len(calls) == 1 + 2 * 4
    assert times == pytest.approx([seen(profiled, name)[0] / 4 for name in ("aten::mm", "aten::_softmax")])
    single = bench_kineto(call, "aten::mm", num_tests=4, flush_l2=False)
    assert isinstance(single, float)
    assert single == pytest.approx(seen(profiled, "aten::mm")[0] / 4)
    assert single > 0


@cpu
def test_kineto_says_what_it_saw_instead_of_a_missing_name(caplog):
    assert bench_kineto(lambda: x @ w, "mqa_logits", num_tests=2, flush_l2=False) == 0
    assert "'mqa_logits'" in caplog.text
    assert "aten::mm" in caplog.text


@cpu
def test_kineto_refuses_a_name_of_several_kernels():
    def call():
        return x @ w + x

    with pytest.raises(InputError, match=r"'aten::' is in the names of .* kernels.*aten::mm"):
        bench_kineto(call, "aten::", num_tests=2, flush_l2=False)
    assert bench_kineto(call, "aten::", num_tests=2, flush_l2=False, with_multiple_kernels=True) > 0


@cpu
def test_kineto_takes_the_name_of_deep_gemms_kernel_for_the_whole_call(profiled):
    def call():
        return (x @ w).exp()

    names = ("bf16_gemm", "gemm_", "aten::mm", "aten::exp")
    whole, every, product, exp = bench_kineto(call, names, num_tests=5)
    assert whole == every
    assert product + exp <= whole
    flush, flushes = seen(profiled, "aten::bitwise_not_")
    assert flushes == 5
    assert whole == pytest.approx((seen(profiled, "")[0] - flush) / 5)  # not the flush, nor what is between calls


@cpu
def test_kineto_flushes_and_writes_a_trace(tmp_path):
    path = tmp_path / "trace.json"
    assert bench_kineto(lambda: x @ w, "aten::mm", num_tests=2, trace_path=str(path)) > 0
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("aten::mm") == names.count("aten::bitwise_not_") == 2


@cpu
def test_kineto_is_silent_on_request(capfd):
    def call():
        os.write(1, b"from a library\n")
        return x @ w

    bench_kineto(call, "aten::mm", num_tests=2, flush_l2=False, suppress_kineto_output=True)
    assert capfd.readouterr().out == "from a library\n"  # the call ahead of the profiler
    os.write(1, b"again\n")
    assert capfd.readouterr().out == "again\n"
