"""`make test` runs all of its phases, whatever fails, and says which ones failed."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PHASES = ["lint", "test-default", "test-versions", "test-interp", "test-compile"]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The Makefile beside an environment whose programs do nothing but say that they ran."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt", "scripts/setup_env.py", ".venv/.ready-test"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    program = '#!/bin/sh\necho "$TRITON_INTERPRET $(basename $0) $*" >> ran.txt\n[ ! -e "fails-$(basename $0)" ]\n'
    (tmp_path / ".venv/bin").mkdir()
    for name in ("python", "ruff", "mypy", "lint-imports"):
        file = tmp_path / ".venv/bin" / name
        file.write_text(program)
        file.chmod(0o755)
    return tmp_path


def make(folder: Path) -> tuple[int, str, str]:
    """Exit code, last line of the output, and what ran."""
    done = subprocess.run(["make", "test"], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout.splitlines()[-1], (folder / "ran.txt").read_text()


def test_it_passes_and_says_what_passed(checkout):
    code, last, ran = make(checkout)
    assert (code, last) == (0, f"make test: passed: {' '.join(PHASES)}")
    assert "1 python -m pytest" in ran


def test_a_failed_phase_does_not_stop_the_others(checkout):
    (checkout / "fails-ruff").touch()
    code, last, ran = make(checkout)
    assert code != 0
    assert last == "make test: failed: lint"
    assert "-m interp" in ran
    assert "-m compile" in ran


def test_every_failed_phase_is_named(checkout):
    (checkout / "fails-python").touch()
    code, last, _ = make(checkout)
    assert code != 0
    assert last == "make test: failed: test-default test-versions test-interp test-compile"
