"""The CUDA C++ kernels under compute-sanitizer: `python scripts/sanitize.py [TOOL ...] [--cases WORDS ...]`.

Tools are memcheck, racecheck and synccheck, all three without a name.  Each runs every case of `sanitize_cases.py`, or
those whose names contain one of WORDS, in a process of its own, as many at a time as there are cores, whichever tool
they are for.  Needs a Hopper GPU and the CUDA toolkit's compute-sanitizer.  Prints a line as a case ends, the slowest
ones and the counts at the end, and exits with 1 if a tool reports anything, a case does not end, or a result is wrong.

--shard I/N   every N-th run, from the I-th on.     --jobs N    processes at a time.
--limit S     seconds that a case may take.         --list      the runs, and none of them.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LIMIT = 200  # seconds for one case; racecheck follows every access to shared memory
TOOLS = ("racecheck", "memcheck", "synccheck")  # the slowest first
CASES = [sys.executable, str(Path(__file__).with_name("sanitize_cases.py"))]
_running: set[int] = set()
"""Process groups of the runs in progress."""
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")
_WHERE = re.compile(r"^=+ +(.*(?:Error|Warning|Race|Read|Write|at ).*)$", re.MULTILINE)
_LINES = 12  # of what was found
_SLOWEST = 5  # that are named at the end


class Verdict(NamedTuple):
    """One case under one tool."""

    tool: str
    case: str
    clean: bool
    words: str
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; the number of runs that found something."""
    wish = _arguments(argv)
    runs = _runs(wish)
    if wish.list:
        print(*(f"{tool}: {case}" for tool, case in runs), sep="\n")
        return 0
    found: list[Verdict] = []
    pool, interrupted = ThreadPoolExecutor(wish.jobs), False
    try:
        for future in as_completed([pool.submit(run_case, tool, case, wish.limit) for tool, case in runs]):
            verdict = future.result()
            found.append(verdict)
            print(f"{verdict.tool}: {verdict.words}: {verdict.case}: {verdict.seconds:.0f} s", flush=True)
    except KeyboardInterrupt:
        interrupted = True
        print(f"interrupted: {len(runs) - len(found)} of {len(runs)} runs have no verdict", flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        _kill_running()
    for verdict in sorted(found, key=lambda v: -v.seconds)[:_SLOWEST]:
        print(f"slowest: {verdict.seconds:.0f} s: {verdict.tool}: {verdict.case}")
    asked, clean = Counter(v.tool for v in found), Counter(v.tool for v in found if v.clean)
    print(*(f"{tool}: {clean[tool]} of {asked[tool]} cases clean" for tool in asked), sep="\n")
    return len(found) - clean.total() or int(interrupted or not found)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The CUDA C++ kernels under compute-sanitizer.")
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=", ".join(TOOLS))
    parser.add_argument("--cases", nargs="+", default=[""], metavar="WORDS")
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--limit", type=float, default=LIMIT)
    parser.add_argument("--list", action="store_true")
    wish = parser.parse_args(argv)
    if unknown := sorted({*wish.tools} - {*TOOLS}):
        parser.error(f"no tools named {', '.join(unknown)}; there are {', '.join(TOOLS)}")
    return wish


def _runs(wish: argparse.Namespace) -> list[tuple[str, str]]:
    """(tool, case), all of a tool before the next tool."""
    names = subprocess.run([*CASES, "--list"], capture_output=True, text=True, check=True).stdout.splitlines()
    chosen = [name for name in names if any(words in name for words in wish.cases)]
    shard, count = (int(number) for number in wish.shard.split("/"))
    return [(tool, name) for tool in TOOLS if tool in (wish.tools or TOOLS) for name in chosen][shard::count]


def run_case(tool: str, case: str, limit: float) -> Verdict:
    """Run one case under one tool."""
    began = time.monotonic()
    clean, words = _sanitized(tool, case, limit)
    return Verdict(tool, case, clean, words, time.monotonic() - began)


def _sanitized(tool: str, case: str, limit: float) -> tuple[bool, str]:
    """Is it clean, and what was said?"""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    # Kernels alone: torch's own are not ours to judge, and racecheck takes minutes over them
    only = ["--kernel-regex", "kns=tilewright"] if tool == "racecheck" else []
    options = ["--tool", tool, "--report-api-errors", "no", *only, "--error-exitcode", "9"]
    # An allocation for every tensor, of its very size: else what lies beyond one is torch's pool, and allowed
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else None
    command = [sanitizer, *options, *CASES, case]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    ) as process:
        _running.add(process.pid)
        try:
            out, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool, and the case that it started
            process.communicate()
            return False, f"did not end in {limit:g} s"
        finally:
            _running.discard(process.pid)
    said = "; ".join(_SUMMARY.findall(out))
    if process.returncode == 0 and said:
        return True, said
    where = "\n".join(_WHERE.findall(out)[:_LINES])
    found = f"{said}\n{where}" if process.returncode == 9 else f"{said}; {(out + errors)[-2000:]}"
    return False, f"exit {process.returncode}, {found}"


def _kill_running() -> None:
    for group in tuple(_running):
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(min(1, main()))
