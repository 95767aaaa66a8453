"""The whole-model benchmarks run on a CPU, check every variant and write what a reader needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_tiny_run(tmp_path):
    result = tmp_path / "model.json"
    command = [sys.executable, ROOT / "benchmarks/model_8b.py", "--tiny", "--device", "cpu", "--json", result]
    command += ["--layers", "1", "--dtype", "float32", "--rounds", "2", "--decode-rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": "src"}, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads(result.read_text())
    assert written["schema"] == 1
    assert written["failed"] == []
    assert list(written["rows"]) == ["transformers_eager", "static", "static_patched", "static_patched_merged"]
    for row in written["rows"].values():
        assert row["agreement"] == 1.0
        assert isinstance(row["commit"], str)
        assert row["prefill_ms"]["median"] > 0
        assert "median" in row["decode_ms_per_token"]
    # One layer of the tiny shape in fp32: attention, gated MLP, norms and the head are read, the embedding is not.
    read = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 192 + 3 * 64 + 512 * 64
    assert written["floors"]["bytes_per_token"] == 4 * (read + 2 * 2 * 16 * (48 + 96))


@pytest.mark.exhaustive
def test_tiny_run_of_the_products(tmp_path):
    result = tmp_path / "products.json"
    command = [sys.executable, ROOT / "benchmarks/products_8b.py", "--shape", "tiny", "--device", "cpu"]
    command += ["--json", result, "--rounds", "2", "--decode-rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": "src"}, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(result.read_text())["rows"]
    assert list(rows) == ["merged", "linears", "gated"]
    assert rows["gated"]["gated"].startswith("not applied: ")  # no table of a CPU has a gated product
    for row in rows.values():
        assert row["agreement"] == 1.0
        assert isinstance(row["commit"], str)
        assert row["merged"].startswith("merged 2 x (64 + 32 + 32) output columns")
        assert all(taken > 0 for metric in ("prefill_ms", "decode_ms_per_token") for taken in row[metric])


def test_every_benchmark_finds_the_names_it_imports():
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    assert "fp8_8b" in names
    program = f"import sys; sys.path.insert(0, 'benchmarks')\nfor name in {names}: __import__(name)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": "src"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
