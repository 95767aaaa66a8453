"""The CUDA C++ kernels under compute-sanitizer: `python scripts/sanitize.py [memcheck racecheck synccheck]`.

Each tool runs every case of `sanitize_cases.py` in a process of its own, several at a time.  Needs a Hopper GPU and the
CUDA toolkit's compute-sanitizer.  Exits with 1 if a tool reports anything, or a result is wrong.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

LIMIT = 200  # seconds for one case; racecheck follows every access to shared memory
TOOLS = ("memcheck", "racecheck", "synccheck")
CASES = [sys.executable, str(Path(__file__).with_name("sanitize_cases.py"))]
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")
_WHERE = re.compile(r"^=+ +(.*(?:Error|Warning|Race|Read|Write|at ).*)$", re.MULTILINE)
_LINES = 12  # of what was found


def main(tools: list[str]) -> int:
    """Run `tools`; the number of runs that found something."""
    names = subprocess.run([*CASES, "--list"], capture_output=True, text=True, check=True).stdout.splitlines()
    bad = 0
    for tool in tools:
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
            clean = list(pool.map(partial(_clean, tool), names))
        bad += clean.count(False)
        print(f"{tool}: {clean.count(True)} of {len(clean)} cases clean", flush=True)
    return bad


def _clean(tool: str, name: str) -> bool:
    """Is one case clean?  What was said is printed as soon as it is, for a run that somebody ends."""
    began = time.monotonic()
    clean, words = _sanitized(tool, name)
    print(f"{tool}: {words}: {name}: {time.monotonic() - began:.0f} s", flush=True)
    return clean


def _sanitized(tool: str, name: str) -> tuple[bool, str]:
    """One case under one tool: is it clean, and what was said."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    # Kernels alone: torch's own are not ours to judge, and racecheck takes minutes over them
    only = ["--kernel-regex", "kns=tilewright"] if tool == "racecheck" else []
    options = ["--tool", tool, "--report-api-errors", "no", *only, "--error-exitcode", "9"]
    try:
        done = subprocess.run(
            [sanitizer, *options, *CASES, name], capture_output=True, text=True, check=False, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return False, f"did not end in {LIMIT} s"
    said = "; ".join(_SUMMARY.findall(done.stdout))
    if done.returncode == 0 and said:
        return True, said
    where = "\n".join(_WHERE.findall(done.stdout)[:_LINES])
    found = f"{said}\n{where}" if done.returncode == 9 else f"{said}; {(done.stdout + done.stderr)[-2000:]}"
    return False, f"exit {done.returncode}, {found}"


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:] or list(TOOLS))))
