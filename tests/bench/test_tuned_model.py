"""The sizes of a model as cases of the bench: each in the sizes of its call, or named."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tilewright.bench.cases import Case
from tilewright.dispatch import contract, record
from tilewright.tuning.model import Size
from tilewright.tuning.recorded import recorded_call

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    """The module of the benchmark, which is no package."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("tuned_model")
    finally:
        sys.path.pop(0)


def size_of(op: str, calls: float, **params: Any) -> Size:
    """The size of one call, as a recording of a model has it."""
    subject = contract(op)
    sample = subject.inputs(params, torch.bfloat16, CPU, 0)
    with torch.no_grad(), record() as recording:
        subject.function(*sample.args, **sample.kwargs)
    raw, args = recording.calls[0][:2]
    size = Size(raw, raw.plan(args, "auto", "default"), "cpu", calls)
    size.add(recorded_call(subject, args))
    return size


def test_cases_have_the_sizes_of_the_calls(program):
    sizes = [
        size_of("matmul", 2.0, M=20, N=64, K=32, bias=True),  # 20 rows in a bucket of 32
        size_of("fmha", 5.0, B=1, H=28, H_kv=4, S=40, D=64, causal=True),
        size_of("fmha", 9.0, B=1, H=28, H_kv=4, S_q=1, S_k=37, D=64),
        size_of("rms_norm", 1.0, M=20, N=64),
    ]
    full, causal, product, norm = cases = list(program.cases_of(sizes, CPU))
    assert all(isinstance(case, Case) and case.direction == "fwd" for case in cases)
    assert [case.workload.params["calls"] for case in cases] == [9.0, 5.0, 2.0, 1.0], "most calls first"
    assert {name: product.workload.params[name] for name in "MNK"} == {"M": 20, "N": 64, "K": 32}
    assert causal.workload.params["causal"]
    assert (causal.workload.params["S_q"], full.workload.params["S_k"]) == (40, 37)
    assert "causal" not in full.workload.params
    assert norm.workload.params["N"] == 64
    for size, case in zip((sizes[2], sizes[1], sizes[0], sizes[3]), cases, strict=True):
        assert size.plan.bucket == case.workload.name


def test_a_size_that_nothing_stands_for_is_named(program):
    refused = size_of("rms_norm", 1.0, M=20, N=64)
    refused.largest, refused.refused = None, "too many data"
    assert list(program.cases_of([refused], CPU)) == [f"rms_norm {refused.plan.bucket} bfloat16: too many data"]


def test_wrong_options(program, capsys):
    assert program.main(["nothing.py:factory", "--device", "cpu"]) == 2
    assert "there is no file" in capsys.readouterr().err
