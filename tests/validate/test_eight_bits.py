"""Results of eight bits: what the accuracy rule sees of them, and the promise that sees the rest."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.harness.registry import own_registry
from torch import Tensor

from tilewright.dispatch import Promises, Workload, contract, register_impl
from tilewright.validate import check
from tilewright.validate.bits import other_bits
from tilewright.validate.metrics import errors
from tilewright.validate.modes.memory import guarded
from tilewright.validate.rule import standard

FP8 = torch.float8_e4m3fn
OP = "per_token_cast_to_fp8"
EXACT = replace(contract(OP), promises=Promises(reference_bits=True))


@pytest.fixture
def plant() -> Iterator[Callable[[Callable[[Tensor], None]], None]]:
    """Registers the cast as backend "cpu", its results changed by a function of q."""

    def planted(change: Callable[[Tensor], None]) -> None:
        @register_impl(OP, backend="cpu")
        def launch(outs: tuple[Tensor, Tensor], *args: Any, config: None) -> None:
            for out, made in zip(outs, contract(OP).forward.reference(*args), strict=True):
                out.copy_(made)
            change(outs[0])

    with own_registry():
        yield planted


def one_step_off(q: Tensor) -> None:
    """The neighbour of one element, as a division that rounds otherwise would give."""
    bits = q.view(torch.uint8)
    bits[3, 40] += 1 if int(bits[3, 40]) & 0x7F < 0x7E else -1


def report(modes: list[str]) -> Any:
    small = Workload("small", {"M": 16, "N": 256})
    return check(EXACT, small, modes=modes, backend="cpu", dtype=torch.bfloat16, device="cpu", seed=1)


def test_one_element_one_step_off_needs_the_promise_of_bits(plant):
    plant(one_step_off)
    assert report(["eager"]).passed
    made = report(["reference_bits"])
    assert made.failed_modes == ("reference_bits",)
    assert "y0: 1 elements have other bits; first difference at (3, 40)" in str(made)


def test_the_right_cast_has_the_bits_it_promises(plant):
    plant(lambda q: None)
    assert report(["reference_bits"]).passed


def test_bits_are_not_asked_of_an_op_that_does_not_promise_them():
    made = check("rms_norm", Workload("small", {"M": 4, "N": 64}), modes=["reference_bits"], backend="torch")
    assert [r.status for r in made.results] == ["skipped"]


def test_other_bits_tells_zeros_apart_and_takes_one_nan_for_another():
    a = torch.tensor([0.0, torch.nan, 1.0])
    b = torch.tensor([-0.0, -torch.nan, 1.0])
    assert other_bits(a, b).tolist() == [True, False, False]
    assert other_bits(a.to(FP8), b.to(FP8)).tolist() == [True, False, False]
    assert other_bits(torch.tensor([1, 2]), torch.tensor([1, 3])).tolist() == [False, True]


def rounded() -> tuple[Any, Tensor]:
    """The standard of values rounded to e4m3, and the right result."""
    exact = 8 * torch.randn(128, 192, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wide = [exact.float()] * 4
    return standard("q", exact, exact.to(FP8), wide, 2.0), exact.to(FP8)


def test_rounding_to_e4m3_passes_and_a_wrong_tile_does_not():
    wanted, right = rounded()
    assert wanted.judge(right).faults == ()
    wrong = right.clone()
    wrong[64:128, 64:128] = right[:64, :64]
    assert any("tile [64:128, 64:128]" in fault for fault in wanted.judge(wrong).faults)


def test_a_nan_of_e4m3_is_found():
    wanted, right = rounded()
    right.view(torch.uint8)[5, 7] = 0x7F
    assert any("1 elements are NaN, the oracle has 0" in fault for fault in wanted.judge(right).faults)


def test_errors_of_e4m3_leave_nan_out():
    found = errors(torch.tensor([1.0, torch.nan]).to(FP8), torch.tensor([1.0, 2.0]).double(), FP8)
    assert found.frobenius == 0


def test_a_guarded_tensor_with_gaps_has_noise_in_them():
    made = guarded((5, 3), torch.float32, torch.device("cpu"), 16, strides=(1, 8))
    everything = torch.empty(0).set_(made.untyped_storage())
    assert everything.numel() == 16 + (2 * 8 + 5) + 16
    assert made.isnan().all()
    assert int(everything.isnan().sum()) < everything.numel() - 16  # 4-byte noise is rarely NaN
