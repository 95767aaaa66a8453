"""The script around compute-sanitizer: what is clean, what is not, and that one case that hangs costs no other."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
TOOL = f"""#!{sys.executable}
import os, pathlib, sys, time
tool, case = sys.argv[sys.argv.index("--tool") + 1], sys.argv[-1]
if "weight only" in case:
    started = pathlib.Path(__file__).with_name(str(os.getpid()))  # cases start side by side
    started.write_text(str(os.getpgid(0)))
    started.rename(started.with_name("started"))
    time.sleep(3600)  # until it is killed
if "swiglu" in case:
    print("========= Invalid __global__ read of size 2 bytes")
    print("=========     at kernel+0x70")
    print("========= ERROR SUMMARY: 1 error")
    sys.exit(9)
if "relu" in case:
    print("1 cases, 1 wrong")
    print("========= ERROR SUMMARY: 0 errors")
    sys.exit(1)
print("========= COMPUTE-SANITIZER")
print("========= RACECHECK SUMMARY: 0 hazards" if tool == "racecheck" else "========= ERROR SUMMARY: 0 errors")
"""


@pytest.fixture
def sanitize_command(tmp_path):
    """The script, and an environment with a stand-in for the tool."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL)
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return [sys.executable, str(SCRIPTS / "sanitize.py")], env


@pytest.fixture
def sanitize(sanitize_command):
    """Runs the script with the stand-in; returns its exit code and lines."""
    command, env = sanitize_command

    def run(*options):
        done = subprocess.run([*command, *options], env=env, capture_output=True, text=True, check=False, timeout=300)
        return done.returncode, done.stdout.splitlines()

    return run


def test_runs_are_told_as_they_end_and_counted_by_tool(sanitize):
    code, lines = sanitize("memcheck", "synccheck", "--cases", "few rows (", "--jobs", "4")
    assert code == 1
    assert sum(line.startswith("memcheck: 0 errors: few rows (") or "exit " in line for line in lines) >= 4
    assert any("exit 9, 1 error" in line for line in lines), "what the tool reports"
    assert any(line.startswith("synccheck: exit 1, 0 errors") for line in lines), "a result that is wrong"
    assert "memcheck: 2 of 4 cases clean" in lines and "synccheck: 2 of 4 cases clean" in lines


def test_a_clean_tool_passes_and_a_case_that_does_not_end_fails(sanitize):
    assert sanitize("racecheck", "--cases", "fp8 (600")[0] == 0
    code, lines = sanitize("racecheck", "--cases", "weight only", "--limit", "0.5")
    assert code == 1 and sum("did not end in 0.5 s" in line for line in lines) == 3


@pytest.mark.exhaustive
def test_shards_together_are_all_runs_and_bad_wishes_are_refused(sanitize):
    whole = sanitize("--list")[1]
    parts = [line for i in range(3) for line in sanitize("--list", "--shard", f"{i}/3")[1]]
    assert sorted(parts) == sorted(whole) and len(whole) == len(set(whole)) > 150
    assert sanitize("leakcheck")[0] == 2
    assert sanitize("memcheck", "--cases", "no such case")[0] == 1, "nothing ran"


def test_an_interruption_ends_what_runs_and_counts_what_has_ended(tmp_path, sanitize_command):
    command, env = sanitize_command
    options = ["memcheck", "--cases", "weight only", "--jobs", "1"]
    with subprocess.Popen([*command, *options], env=env, stdout=subprocess.PIPE, text=True) as process:
        started = tmp_path / "started"
        while not started.exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "interrupted: 3 of 3 runs have no verdict" in out
    with pytest.raises(ProcessLookupError):
        os.killpg(int(started.read_text()), 0)
