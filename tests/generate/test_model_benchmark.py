"""The whole-model benchmark runs on a CPU, checks every variant and writes what a reader needs."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
