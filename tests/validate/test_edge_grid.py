"""The grid of edge sizes: the same problems everywhere, all drawable; and what it must find in a kernel is found."""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from itertools import chain
from pathlib import Path

import pytest
import torch
from tests.harness.registry import own_registry

import tilewright.ops  # noqa: F401 - binds every contract
from tilewright.dispatch import Sample, contract, contracts, register_impl
from tilewright.errors import BackendError, InputError
from tilewright.validate.edge_grid import EDGES, OFFSETS, TILES, problems
from tilewright.validate.edge_run import placed, run_problem

CPU = torch.device("cpu")
SCRIPT = Path(__file__).parents[2] / "scripts" / "edge_grid.py"
OPS = tuple(contracts())


def texts(name, seed=0, density=1.5):
    return [str(problem) for problem in problems(contract(name), seed, density)]


@pytest.mark.parametrize("name", ["rms_norm", "fmha", "group_gemm"])
def test_a_seed_decides_and_a_small_density_gives_the_first_of_a_large_one(name):
    assert texts(name) == texts(name)
    assert texts(name) != texts(name, seed=1000)
    few = texts(name, density=0.5)
    assert 2 <= len(few) < len(texts(name)) and texts(name)[: len(few)] == few


def test_edges_stand_on_both_sides_of_every_tile():
    assert {0, 1, 2, *(tile + step for tile in TILES for step in (-1, 0, 1))} == set(EDGES)


def test_the_grid_of_attention_reaches_what_it_is_for():
    drawn = [p for seed in range(0, 8000, 1000) for p in problems(contract("fmha"), seed)]
    params = [p.params for p in drawn]
    assert {p.offset for p in drawn} == set(OFFSETS)
    assert {0, 1, 2} <= {n for p in params for n in (p.get("S"), p.get("S_q"), p.get("S_k"))}
    assert len({p["D"] for p in params}) > 25 and {p["D"] % 8 for p in params} == {0}
    groups = {p["H"] // p.get("H_kv", p["H"]) for p in params}
    assert 1 in groups and len(groups) > 3, "MHA and groups"
    assert any(p.get("H_kv") == 1 and p["H"] > 1 for p in params), "MQA"
    for name in ("sinks", "softcap", "alibi", "window"):
        assert any(name in p for p in params) and not all(name in p for p in params)


@pytest.mark.parametrize("name", OPS)
def test_every_problem_can_be_drawn(name):
    for seed in (0, 1000, 2000):
        for problem in problems(contract(name), seed):
            with suppress(InputError):  # a refusal in words, which the runner counts
                contract(name).inputs(problem.params, problem.dtype, CPU, problem.seed)


@pytest.mark.parametrize("offset", OFFSETS)
def test_tensors_lie_behind_a_boundary_among_marked_bytes(offset):
    wide = torch.arange(24.0).view(4, 6)
    sample = placed(Sample((wide[:, 1:3], wide.T), {"z": torch.arange(5, dtype=torch.int32)}), offset, 100)
    x, y, z = *sample.args, sample.kwargs["z"]
    assert torch.equal(x, wide[:, 1:3]) and torch.equal(y, wide.T) and torch.equal(z, torch.arange(5).int())
    assert x.stride() == (6, 1) and y.stride() == (1, 6)
    assert x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr(), "views of one memory stay that"
    start = y.storage_offset() * 4
    assert start % 256 == -(-offset // 4) * 4 and start >= 100
    memory = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    assert (memory[:start] == 0xFF).all() and (memory[start + 96 :] == 0xFF).all()
    assert len(memory) == start + 96 + 100


# ------------------------------------------------------------------------------------------------- what must be found


@pytest.fixture
def registry():
    with own_registry():
        yield


def run_all(name="softmax", backend="cpu"):
    op = contract(name)
    return [run_problem(op, p, backend, CPU) for p in problems(op, 0)]


def plant(change):
    """A backend "cpu" of softmax: right, and then `change(y, x)`."""

    @register_impl("softmax", backend="cpu")
    def launch(outs, x, *, config):
        outs[0].copy_(torch.softmax(x.float(), -1))
        change(outs[0], x)


def beside(t, elements):
    """A view of what lies so many elements behind the first element of `t`."""
    return t.as_strided((1,), (1,), t.storage_offset() + elements)


def test_a_right_kernel_passes(registry):
    plant(lambda y, x: None)
    results = run_all()
    assert {r.status for r in results} == {"passed"}, [r.details for r in results]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda y, x: y.view(-1)[-1:].mul_(1.5), "off by|ULP|NaN"),
        (lambda y, x: y.view(-1)[-1:].fill_(torch.nan), "NaN"),
        (lambda y, x: y.mul_(1.01), "of its norm"),
        (lambda y, x: beside(y, y.numel()).fill_(3) if room(y) else None, "memory after the output was overwritten"),
        (lambda y, x: beside(y, -1).fill_(3) if room(y) else None, "memory before the output was overwritten"),
        (lambda y, x: beside(x, -1).fill_(3), "of the inputs, or beside them, was written to"),
        (lambda y, x: y.view(-1)[:1].add_(beside(x, -1)), "NaN"),
        (lambda y, x: raise_("the launch failed"), "BackendError: the launch failed"),
    ],
)
def test_a_wrong_kernel_fails(registry, change, words):
    plant(change)
    found = [r for r in run_all() if r.status == "failed"]
    assert any(re.search(words, d) for r in found for d in r.details), [r.details for r in found]


def room(y):
    return y.untyped_storage().nbytes() > y.numel() * y.element_size()


def raise_(words):
    raise BackendError(words)


def test_what_planning_refuses_is_refused_with_the_reason(registry):
    results = run_all(backend="triton")
    assert {r.status for r in results} == {"refused"}
    assert all("runs on cuda tensors, got cpu" in r.details[0] for r in results)


def test_a_fault_of_the_second_call_is_found(registry):
    """The first one plans, the next ones take another road."""
    calls = []
    plant(lambda y, x: calls.append(0) or (y.zero_() if len(calls) % 5 == 3 else None))
    assert any("on tape: " in d for r in run_all() for d in r.details)


@pytest.mark.interp
@pytest.mark.parametrize("name", ["rms_norm", "softmax"])
def test_triton_kernels_on_the_first_problems(name):
    op = contract(name)
    for problem in problems(op, 0, 0.3):
        result = run_problem(op, problem, "triton", CPU)
        assert result.status in ("passed", "refused"), (str(problem), result.details)


# ----------------------------------------------------------------------------------------------------------- the script


BROKEN = """
import os, time, torch
import tilewright.ops.reduction.kernels.cpu.softmax  # or it would replace what follows when it is read
from tilewright.dispatch import register_impl

@register_impl("softmax", backend="cpu")
def launch(outs, x, *, config):
    if x.shape[-1] == 1:
        os.abort()
    if x.shape[-1] == 256:
        time.sleep(600)
    outs[0].copy_(torch.softmax(x.float(), -1))
    if x.shape[-1] == 17:
        outs[0].mul_(1.5)
"""


def run_script(tmp_path, *options):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu", "--json", str(tmp_path / "found.json"), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done, done.stdout.splitlines()


@pytest.mark.exhaustive
def test_a_process_that_dies_or_is_silent_costs_its_problem_alone(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    options = ("--ops", "softmax", "--backends", "cpu", "torch", "--jobs", "1", "--seed", "154", "--density", "1.2")
    done, lines = run_script(tmp_path, *options, "--silence", "12", "--load", str(tmp_path / "broken.py"))
    found = json.loads((tmp_path / "found.json").read_text())
    sizes = {r["number"]: int(r["problem"].split(" N=")[1].split()[0]) for r in found["results"]}
    assert done.returncode == 1 and len(found["results"]) == 2 * len(sizes)
    for r in found["results"]:
        expected = {1: "crashed", 17: "failed", 256: "silent"}.get(sizes[r["number"]], "passed")
        assert r["status"] == ("passed" if r["backend"] == "torch" else expected), r
    assert [found["counts"][status] for status in ("crashed", "failed", "silent")] == [1, 1, 1]
    assert sum(line.startswith("CRASHED") and "signal 6" in line for line in lines) == 1
    assert lines[-1].startswith(f"edge grid, seed 154: {len(sizes)} problems; {2 * len(sizes) - 3} passed, 1 failed")


SANITIZER = f"""#!{sys.executable}
import os, sys
print("========= COMPUTE-SANITIZER", flush=True)
os.execv(sys.argv[sys.argv.index("--print-limit") + 2], sys.argv[sys.argv.index("--print-limit") + 2:])
"""
REPORTED = """
import tilewright.ops.reduction.kernels.cpu.softmax, os, torch
from tilewright.dispatch import register_impl

@register_impl("softmax", backend="cpu")
def launch(outs, x, *, config):
    outs[0].copy_(torch.softmax(x.float(), -1))
    assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    if x.shape[-1] == 17:
        print("========= Invalid __global__ write of size 4 bytes")
        print("=========     at softmax_kernel+0x70", flush=True)
"""


def test_what_memcheck_reports_is_laid_to_the_problem_it_was_at(tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "reported.py").write_text(REPORTED)
    options = ("--ops", "softmax", "--backends", "cpu", "--jobs", "1", "--seed", "154", "--density", "1.2")
    done, lines = run_script(tmp_path, *options, "--memcheck", "--load", str(tmp_path / "reported.py"))
    assert done.returncode == 1 and " 8 passed, 1 failed, 0 crashed" in lines[-1]
    (told,) = [line for line in lines if line.startswith("FAILED")]
    assert " N=17 " in told and "Invalid __global__ write" in told and "softmax_kernel" in told


@pytest.mark.exhaustive
def test_shards_together_are_the_list(tmp_path):
    options = ("--list", "--ops", "softmax", "rms_norm")
    whole = run_script(tmp_path, *options)[1]
    parts = [run_script(tmp_path, *options, "--shard", f"{i}/3")[1] for i in range(3)]
    assert sorted(chain(*parts)) == sorted(whole) and len(whole) == len(set(whole))


def test_refusals_are_counted_by_their_reason(tmp_path):
    done, lines = run_script(tmp_path, "--ops", "softmax", "--backends", "triton", "--jobs", "1", "--density", "0.5")
    assert done.returncode == 1, "nothing passed"
    assert any(line.startswith("refused ") and "runs on cuda tensors, got cpu" in line for line in lines)
    assert " 0 passed, 0 failed" in lines[-1]
