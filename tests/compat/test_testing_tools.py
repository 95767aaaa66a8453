"""DeepGEMM's tools for tests: bits, what runs where, and names of kernels that stand for a whole call."""

import os

import pytest
import torch

from tilewright.compat.deep_gemm.testing import (
    assert_bitwise_equal,
    bench_kineto,
    get_arch_major,
    ignore_env,
    test_filter,
)


def test_bits_are_compared():
    x = torch.tensor([1.0, float("nan"), 0.0])
    assert_bitwise_equal(x, x.clone())
    assert_bitwise_equal(torch.arange(6).view(2, 3).T, torch.arange(6).view(2, 3).T.contiguous())
    with pytest.raises(AssertionError, match="1 of 12 bytes differ"):
        assert_bitwise_equal(x, torch.tensor([1.0, float("nan"), -0.0]))
    with pytest.raises(AssertionError, match="x is torch.float32, y is torch.float64"):
        assert_bitwise_equal(x, x.double())
    with pytest.raises(AssertionError, match=r"x is \(3,\), y is \(1, 3\)"):
        assert_bitwise_equal(x, x[None])


def test_architecture_is_the_gpus_or_the_planned_one():
    wanted = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 9
    assert get_arch_major() == wanted


def test_filtered_tests_run_where_their_condition_holds(capsys):
    holds = []

    @test_filter(lambda: bool(holds))
    def case(x, *, y):
        return x + y

    assert case.__name__ == "case"
    assert case(1, y=2) is None
    assert "case: left out" in capsys.readouterr().out
    holds.append(1)  # asked at each call
    assert case(1, y=2) == 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("given", ["1", None])
def test_a_variable_is_away_while_the_test_runs(monkeypatch, given):
    monkeypatch.delenv("SOME_SWITCH", raising=False)
    if given is not None:
        monkeypatch.setenv("SOME_SWITCH", given)

    @ignore_env("SOME_SWITCH", lambda: True)
    def without(fail):
        assert "SOME_SWITCH" not in os.environ
        if fail:
            raise ValueError("the test's own")

    @ignore_env("SOME_SWITCH", lambda: False)
    def with_it():
        return os.environ.get("SOME_SWITCH")

    without(False)
    assert os.environ.get("SOME_SWITCH") == given
    with pytest.raises(ValueError, match="own"):
        without(True)
    assert os.environ.get("SOME_SWITCH") == given == with_it()


# On a CPU the profiler sees torch's operators.

x, w = torch.randn(64, 64), torch.randn(64, 64)
cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="names of torch's operators on a CPU")


@cpu
def test_kineto_takes_a_general_name_for_the_whole_call_where_no_kernel_has_it():
    def call():
        return x @ w

    assert bench_kineto(call, "nvjet", num_tests=5, flush_l2=False) > 0
    assert bench_kineto(call, "pack_fp32_into_ue8m0", num_tests=5, flush_l2=False) > 0
    product, reduction = bench_kineto(call, ("aten::mm", "nvjet"), num_tests=5, flush_l2=False)
    assert product > 0 == reduction  # or a sum over names would count twice


@cpu
def test_kineto_calls_a_barrier_before_each_call():
    order = []
    bench_kineto(lambda: order.append("fn"), "gemm_", num_tests=3, flush_l2=False, barrier=lambda: order.append("b"))
    assert order == ["fn", *["b", "fn"] * 6]


@cpu
def test_kineto_raises_what_programs_catch():
    with pytest.raises(AssertionError, match=r"'aten::' is in the names of .* kernels"):
        bench_kineto(lambda: x @ w + x, "aten::", num_tests=2, flush_l2=False)
