"""The seeded list of problems: stable, from all ops, within its limits; and a run of it from end to end."""

import importlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from tilewright.bench.cases import known_contracts
from tilewright.bench.schema import Row, load

ROOT = Path(__file__).parents[2]
NAMES = ("any_size_draw", "any_size_recipes", "any_size_plans", "any_size")


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[str, ModuleType]]:
    """The modules of the benchmark, which are no package."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def drawn(programs: dict[str, ModuleType]) -> Any:
    """draw(seed, count, **options): the problems."""
    draw, recipes = programs["any_size_draw"], programs["any_size_recipes"].RECIPES

    def problems(seed: int, count: int, **options: Any) -> Any:
        return draw.problems(seed, count, recipes, **options)

    return problems


def test_every_op_has_a_recipe(programs):
    assert set(programs["any_size_recipes"].RECIPES) == {name for name in known_contracts() if "test_" not in name}


def test_the_sequence_is_the_one_that_python_promises(programs):
    draw = programs["any_size_draw"].Draw(7, "matmul", 1)
    assert [draw.below(1000) for _ in range(5)] == [810, 852, 105, 227, 168]
    assert draw.shuffled("abcde") == [*"ebcda"]


def test_a_list_is_that_of_its_seed(drawn):
    first = [str(problem) for problem in drawn(7, 60)]
    assert first == [str(problem) for problem in drawn(7, 60)]
    assert first[:20] == [str(problem) for problem in drawn(7, 20)]
    assert first != [str(problem) for problem in drawn(8, 60)]


def test_some_ops_get_the_problems_that_they_have_among_all(drawn):
    of_all = [str(problem) for problem in drawn(7, 200) if problem.op in ("matmul", "fmha")]
    assert [str(problem) for problem in drawn(7, len(of_all), ops=("matmul", "fmha"))] == of_all


def test_the_mix_is_what_the_program_says(programs, drawn):
    found = drawn(1, 400)
    ops = Counter(problem.op for problem in found)
    assert set(ops) == set(programs["any_size_recipes"].RECIPES)
    assert f"cycles of {sum(weight for weight, _ in programs['any_size_recipes'].RECIPES.values())}:" in (
        programs["any_size"].__doc__
    )
    assert min(ops["matmul"], ops["fmha"]) > 15
    assert len({problem.model for problem in found}) > 30
    dtypes = Counter(problem.sizes.dtype for problem in found)
    assert dtypes[torch.bfloat16] > 100
    assert min(dtypes[torch.float16], dtypes[torch.float32], dtypes[torch.float8_e4m3fn]) > 20
    assert 10 < sum(problem.direction == "bwd" for problem in found) < 130
    rows = [problem.params["M"] for problem in found if problem.op in ("rms_norm", "swiglu", "softmax", "matmul")]
    assert min(rows) == 1
    assert max(rows) > 4096
    assert any(m > 64 and m % 2 for m in rows)


def test_names_are_unique_and_hold_the_seed(drawn):
    found = drawn(5, 200)
    assert len({problem.case().key for problem in found}) == 200
    assert {problem.params["seed"] for problem in found} == {5}


@pytest.mark.parametrize("limits", ["GPU", "CPU"])
def test_problems_are_inputs_of_their_ops_and_fit(limits, programs, drawn):
    """Inputs of every op at its sizes exist, whatever the device; none reads `seed`."""
    allowed = getattr(programs["any_size_draw"], limits)
    for problem in drawn(2, 134, limits=allowed):
        contract = known_contracts()[problem.op]
        with FakeTensorMode():
            sample = contract.inputs(problem.params, problem.sizes.dtype, torch.device("cpu"), 0)
        tensors = [leaf for leaf in tree_leaves((sample.args, dict(sample.kwargs))) if isinstance(leaf, torch.Tensor)]
        held = sum(t.numel() * t.element_size() for t in tensors)
        assert held <= 1.05 * allowed.bytes_moved, str(problem)


def test_a_model_has_a_source(programs):
    models = programs["any_size_draw"].models()
    assert len({model.name for model in models}) == 40
    for model in models:
        assert model.source.startswith("https://huggingface.co/")
        assert model.heads % model.kv_heads == 0
        assert bool(model.experts) == bool(model.top_k) == bool(model.expert_intermediate)


def test_plans_name_what_several_kernels_of_torch_compute(programs, drawn):
    """Without a GPU.  A view and an allocation are no kernels."""
    lines = programs["any_size_plans"].plans(drawn(3, 10, ops=("rms_norm", "softmax")))
    assert "0 problems go to several kernels" in "\n".join(lines)
    counted = programs["any_size_plans"].Kernels()
    x = torch.ones(4, 6)
    with counted:
        ((x.view(6, 4).mT + 1).exp() * torch.empty(4, 6)).sum()
    assert counted.names == ["add", "exp", "mul", "sum"]


def _row(op: str, case: str, ratio: float | None) -> Row:
    values = dict.fromkeys(Row.__dataclass_fields__)
    peers = {} if ratio is None else {"slow": 9.0, "fast": 2.0 * ratio}
    values |= {"op": op, "case": case, "dtype": "bfloat16", "direction": "fwd", "impls": {"triton": 2.0}}
    return Row(**{**values, "chosen": "triton", "peers": peers, "ratio_auto": ratio})


def test_the_summary(programs):
    rows = [_row("a", "one", 0.5), _row("a", "two", 2.0), _row("b", "three", 0.95), _row("b", "four", None)]
    text = programs["any_size"].summary(rows)
    assert [line.split() for line in text[2:5]] == [
        ["a", "2", "1.000", "50%", "50%"],
        ["b", "1", "0.950", "100%", "0%"],
        ["all", "3", "0.983", "67%", "33%"],
    ]
    assert [line.split()[0] for line in text if "fast" in line] == ["0.500", "0.950", "2.000"]
    assert "0.500  a one bfloat16 fwd: triton 2.00 us, fast 1.00 us" in text[7]
    assert text[-1] == "1 rows without a peer"


def test_a_resumed_run_needs_the_file(programs, capsys):
    assert programs["any_size"].main(["--resume", "--device", "cpu", "--count", "1"]) == 2
    assert "give both" in capsys.readouterr().err
    assert programs["any_size"].main(["--ops", "matmull", "--list"]) == 2
    assert "no op named matmull" in capsys.readouterr().err
    assert programs["any_size"].main(["--seed", "4;5", "--list"]) == 2
    assert "--seed 4;5" in capsys.readouterr().err


def test_several_seeds_take_turns(programs, capsys):
    assert programs["any_size"].main(["--seed", "4,5,4", "--count", "3", "--list"]) == 0
    cases = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert [case.split("_")[0] for case in cases] == ["s4", "s5"] * 3


def test_the_summary_of_several_seeds(programs):
    rows = [replace(_row("a", f"s{seed}", 0.5 * seed), params={"seed": seed}) for seed in (1, 2)]
    text = programs["any_size"].summaries(rows)
    headings = [line for line in text if "seed" in line]
    assert headings == ["seed 1", "seed 2", "2 seeds"]
    assert [line.split()[2] for line in text if line.startswith("all")] == ["0.500", "1.000", "0.707"]
    assert programs["any_size"].summaries(rows[:1]) == programs["any_size"].summary(rows[:1])


def test_a_budget_cuts_off_what_runs_and_nothing_later(programs):
    cut_off = programs["any_size"]._cut_off
    with pytest.raises(KeyboardInterrupt), cut_off(0.05):
        time.sleep(10.0)
    with cut_off(0.05):
        pass
    time.sleep(0.1)
    with cut_off(None):
        time.sleep(0.1)


@pytest.mark.exhaustive
def test_an_interrupted_run_writes_the_rows_that_it_has(programs, tmp_path, monkeypatch, capsys):
    """The second of two problems takes longer than the budget."""
    measured = programs["any_size"].run.__globals__["measure"]

    def slow(shared: Any, case: Any) -> Any:
        if case.workload.name.startswith("s4_002"):
            time.sleep(60.0)
        return measured(shared, case)

    monkeypatch.setitem(programs["any_size"].run.__globals__, "measure", slow)
    result = tmp_path / "any_size.json"
    options = ["--seed=4", "--device=cpu", "--against=eager", "--ops=splitk_reduce", "--count=2", "--budget=12"]
    assert programs["any_size"].main([*options, "--json", str(result)]) == 0
    assert [row.case.split("_")[1] for row in load(result).rows] == ["001"]
    assert "1 problems not measured" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_tiny_run(tmp_path):
    """Five problems on a CPU, the last two of them by --resume, as bench JSON with the seed."""
    result = tmp_path / "any_size.json"
    command = [sys.executable, ROOT / "benchmarks/any_size.py", "--seed", "4", "--device", "cpu", "--json", result]
    command += ["--against", "eager", "--ops", "rms_norm,softmax,layer_norm,per_token_cast_to_fp8"]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        environment = {"PYTHONPATH": "src", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        done = subprocess.run([*command, *more], capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    assert "3 rows in" in run("--count", "3").stdout
    assert "2 rows in" in run("--count", "5", "--resume").stdout
    more = run("--count", "1", "--seed", "5", "--resume").stdout  # the last --seed is the one
    assert "1 rows in" in more
    assert "2 seeds" in more, "rows of both stand in the file and in the summary"
    written = load(result)
    assert (written.suite, written.failures) == ("any_size", [])
    assert [row.params["seed"] for row in written.rows] == [4] * 5 + [5]
    for row in written.rows:
        assert set(row.peers) == {"eager"}
        assert row.ratio_auto > 0
