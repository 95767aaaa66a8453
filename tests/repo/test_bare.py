"""Without the extras: plain modules are optimised, and what is missing is one line that names the `pip install`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("transformers", "tokenizers", "safetensors", "jinja2", "matplotlib", "triton", "cuda")
PROGRAM = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r})); "
FACTORY = (
    "import torch\n"
    "def make():\n"
    "    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)), torch.randn(4, 16)\n"
)


def bare(folder: Path, program: str) -> subprocess.CompletedProcess:
    """`program` in a Python that has none of the extras."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TILEWRIGHT_CACHE_DIR": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + program], cwd=folder, env=env, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip


def command(folder: Path, *words: str) -> subprocess.CompletedProcess:
    return bare(folder, f"sys.argv = ['tilewright', *{words!r}]; from tilewright.cli import main; main()")


def test_a_plain_module_needs_no_transformers(tmp_path):
    program = (
        "import torch\n"
        "from tests.assistant.planted import ceilings\n"
        "from tilewright.assistant import optimize\n"
        "model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)).eval()\n"
        "report = optimize(model, torch.randn(4, 16), allow=['op_replacement', 'static_decode', 'bf16'],\n"
        "                  ceilings=ceilings(), budget_s=2.0).report\n"
        "print(*(f'{c.name}: {c.decision}' for c in report.changes), sep='; ')\n"
    )
    done = bare(tmp_path, f"sys.path.insert(0, {str(ROOT)!r})\n" + program)
    assert done.returncode == 0, done.stderr
    assert "static_decode: not applicable" in done.stdout


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("optimize", "folder"), "hf"),
        (("optimize", "plain.py:make", "--html", "page.html"), "report"),
        (("bench", "--report"), "report"),
    ],
    ids=" ".join,
)
def test_a_missing_extra_is_one_line(tmp_path, words, extra):
    (tmp_path / "plain.py").write_text(FACTORY)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    done = command(tmp_path, *words)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert f"pip install 'tilewright[{extra}]'" in done.stderr.strip().splitlines()[-1]
