"""`import tilewright` is light: no compiler, no CUDA context, little to do, and a process may fork after it.

The package imports its parts on first use. So that this hides nothing, all ops are included.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_INDEX_CALLS = 100  # of `import tilewright.ops`, however many ops there are; 21 were counted
MAX_OP_CALLS = 1_000  # of an op's own import, on average; 820 were counted.  Dynamo alone makes half a million

# Libraries that an import of ours must not load; `import torch` itself may have loaded some of them already.
HEAVY = (
    "triton",
    "transformers",
    "torch._inductor",
    "torch._dynamo",
    "cuda",
    "cutlass",
    "jinja2",
    "matplotlib",
    "rich",
    "typer",
)


def run(program: str) -> str:
    """Standard output of a fresh Python with the checkout on its path; bytecode is kept, as a user's Python does."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def imported() -> dict:
    """What a fresh Python looks like after `import torch` and the import of every op."""
    return json.loads(
        run(
            "import json, sys, torch; before = set(sys.modules); import tilewright.ops;"
            "from tilewright.dispatch import contracts; contracts();"
            "print(json.dumps({'modules': sorted(set(sys.modules) - before), 'cuda': torch.cuda.is_initialized()}))"
        )
    )


def test_no_heavy_module_is_loaded(imported):
    heavy = [m for m in imported["modules"] if m.startswith(tuple(f"{h}." for h in HEAVY)) or m in HEAVY]
    assert heavy == []


def test_no_cuda_context_is_created(imported):
    assert imported["cuda"] is False


def test_import_does_little_work_beside_import_torch():
    """Counted in calls of Python functions outside of the import system: the same number on a busy machine."""
    program = (
        "import sys, torch\n"
        "calls = 0\n"
        "def profile(frame, event, argument):\n"
        "    global calls\n"
        "    calls += event == 'call' and not frame.f_code.co_filename.startswith('<frozen')\n"
        "sys.setprofile(profile)\n"
        "import tilewright.ops\n"
        "index = calls\n"
        "from tilewright.dispatch import contracts\n"
        "ops = len(contracts())\n"
        "sys.setprofile(None)\n"
        "print(index, calls, ops)\n"
    )
    index, calls, ops = map(int, run(program).split())
    assert index <= MAX_INDEX_CALLS
    assert calls <= MAX_OP_CALLS * ops


def test_ops_work_in_a_forked_child():
    output = run(
        "import os, sys, torch, tilewright\n"
        "from tilewright import ops\n"
        "x, w = torch.randn(4, 64), torch.ones(64)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    y = ops.rms_norm(x, w)\n"
        "    os._exit(0 if torch.isfinite(y).all() else 1)\n"
        "_, status = os.waitpid(child, 0)\n"
        "print(os.waitstatus_to_exitcode(status), torch.equal(ops.rms_norm(x, w), ops.rms_norm(x, w)))\n"
    )
    assert output.split() == ["0", "True"]


def test_version_is_the_one_of_the_distribution():
    import tomllib

    import tilewright

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert tilewright.__version__ == declared
