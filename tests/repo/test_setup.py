"""Set-up says in one line what is missing on a fresh machine."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "setup_env.py"


@pytest.fixture
def setup_env():
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False)


def test_missing_venv_package_is_one_line(tmp_path):
    """Debian's python3 without python3-venv has the module venv and lacks ensurepip."""
    (tmp_path / "ensurepip.py").write_text("raise ImportError('not packaged')")
    done = run("test", PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    (line,) = done.stderr.strip().splitlines()
    assert "apt-get install python3-venv" in line


def test_unknown_target_is_one_line():
    done = run("everything")
    assert done.returncode != 0
    (line,) = done.stderr.strip().splitlines()
    assert "demo, test" in line
    assert "everything" in line


def test_missing_compiler_is_a_notice_not_an_error(setup_env, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    setup_env.check_tools()
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert "g++" in line
    assert "rejected change" in line


def test_an_index_that_does_not_answer_is_seen_at_once(setup_env):
    assert setup_env.reachable("https://no-such-host.invalid/") is False


def test_packages_of_a_gpu_machine_are_not_pinned(setup_env, monkeypatch, tmp_path):
    monkeypatch.setattr(setup_env, "VENV", tmp_path)
    monkeypatch.setattr(setup_env, "output", lambda *_: "torch triton transformers import_linter")
    pins = setup_env.constraints(gpu=True).read_text()
    assert "ruff==" in pins
    assert "triton==" not in pins
    assert "import-linter==" not in pins
    assert "triton==" in setup_env.constraints(gpu=False).read_text()


def test_make_names_a_missing_python():
    done = subprocess.run(
        ["make", "-n", "PYTHON=no-such-python", "check-python"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "apt-get install python3" in done.stdout
