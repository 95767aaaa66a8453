"""The command line as a whole: help, version, exit codes, and how quickly it answers."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import tilewright as package
from tilewright.errors import VerificationError

SOURCE = Path(__file__).resolve().parents[2] / "src"
COMMANDS = ("doctor", "calibrate", "ops", "explain", "check", "bench", "tune", "warmup", "analyze", "optimize")


def process(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m tilewright ...` as a user starts it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TILEWRIGHT_")}
    env = {**kept, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "tilewright", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_alone_it_shows_every_command(tilewright):
    done = tilewright()
    assert done.exit_code == 0
    assert all(re.search(rf"^  {command} ", done.stdout, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_json_and_an_example_that_the_command_understands(tilewright, command):
    described = tilewright(command, "--help").stdout
    assert "--json FILE" in described
    [example] = re.findall(r"Example: tilewright (.+)", described)
    words = shlex.split(example)
    assert words[0] == command
    assert all(word in described for word in words if word.startswith("--"))


def test_version(tilewright):
    assert tilewright("--version").stdout == f"tilewright {package.__version__}\n"


def test_a_failed_verification_exits_with_1(tilewright, monkeypatch):
    def fails():
        raise VerificationError("the logits differ")

    monkeypatch.setattr("tilewright.cli.doctor.examine", fails)
    done = tilewright("doctor")
    assert (done.exit_code, done.stderr) == (1, "tilewright: the logits differ\n")


def test_a_bug_of_ours_keeps_its_traceback(tilewright, monkeypatch):
    monkeypatch.setattr("tilewright.cli.doctor.examine", lambda: 1 / 0)
    assert isinstance(tilewright("doctor").exception, ZeroDivisionError)


def test_an_interrupt_ends_quietly(tilewright, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("tilewright.cli.doctor.examine", interrupted)
    done = tilewright("doctor")
    assert done.exit_code == 130
    assert "Traceback" not in done.output


def test_the_log_level_of_the_environment_is_applied(tilewright, monkeypatch):
    """A user error shows where it was raised only when asked."""
    import logging

    monkeypatch.setenv("TILEWRIGHT_LOG", "debug")
    tilewright("explain", "nope")
    assert logging.getLogger("tilewright").level == logging.DEBUG


def test_numbers_that_json_does_not_know_become_null(capsys):
    from tilewright.cli.output import emit

    emit({"err": float("nan"), "ratio": float("inf"), "us": 1.5}, "text", "-")
    assert json.loads(capsys.readouterr().out) == {"err": None, "ratio": None, "us": 1.5}


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["optimize", "--help"], ["bench", "--nope"]])
def test_answers_about_itself_load_no_library(words):
    program = (
        "import sys\nfrom tilewright.cli import app\n"
        f"try:\n    app({words!r})\n"
        "except SystemExit:\n    print('\\n', *sys.modules)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {"torch", "numpy", "triton", "transformers", "matplotlib", "jinja2"}


def test_as_a_process_json_is_alone_on_stdout():
    done = process("explain", "rms_norm", "--device", "cpu", "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["op"] == "rms_norm"


@pytest.mark.parametrize(
    ("words", "variable"),
    [
        (["explain", "nope"], {}),
        (["bench", "--nope"], {}),
        (["ops"], {"DISABLE_FALLBACK": "perhaps"}),  # refused while the library is being imported
    ],
)
def test_as_a_process_wrong_input_is_one_line(words, variable):
    done = process(*words, **variable)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("tilewright: ")


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{shlex.quote(sys.executable)} -m tilewright ops | true"
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
