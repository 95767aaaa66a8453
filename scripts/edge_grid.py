"""Edge sizes of every op on every backend: `python scripts/edge_grid.py [--seed N] [--ops ...] [--backends ...]`.

Runs a seeded sample (`tilewright.validate.edge_grid`) forward and backward, each problem on each backend that planning
does not refuse, against the float64 oracle; tensors begin off their boundary, and what lies around them is watched.
Problems run in processes of their own, as many as there are cores.  A process that dies, or is silent for too long,
costs the problem it was at; another one goes on behind it.  Prints a line a failure and a summary, writes JSON, and
exits with 1 if anything failed.

--list              prints the problems and runs none.
--shard I/N         every N-th problem, from the I-th on (0 to N - 1).
--memcheck          each process runs under compute-sanitizer's memcheck, every tensor in an allocation of its own and
                    nothing compared: that is another run's work, whose compiled kernels this one finds.
"""

import argparse
import json
import os
import queue
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import tilewright.ops  # noqa: F401 - binds every contract
from tilewright.dispatch import contracts
from tilewright.dispatch.backends import BACKENDS
from tilewright.validate.edge_grid import EdgeProblem, problems
from tilewright.validate.edge_run import run_problem

DENSITY, DENSITY_MEMCHECK = 1.5, 0.6
SILENCE, SILENCE_MEMCHECK = 180, 400  # seconds for one problem on one backend
_FRAME = re.compile(r"=+ *$|=+ (COMPUTE-SANITIZER|ERROR SUMMARY|LEAK SUMMARY)")
_SAID = "edge_grid: "  # what a worker says to the process above it; other lines are a tool's
_TAIL = 1500  # characters of what a process said before it died


def main(argv: Sequence[str] | None = None) -> int:
    """Run the grid; how many problems failed."""
    wish = _arguments(argv)
    if wish.worker:
        return _work(wish)
    wanted = _wanted(wish)
    if wish.list:
        print(*(f"{i}: {problem}" for i, problem in wanted), sep="\n")
        return 0
    began = time.monotonic()
    run = _Run(wish, wanted)
    results = run.finish()
    counted = Counter(result["status"] for result in results)
    reasons = Counter(
        f"{r['op']}[{r['backend']}] {_kind(r['details'][0])}" for r in results if r["status"] == "refused"
    )
    reasons.update(
        f"{r['op']}[{r['backend']}] backward: {_kind(r['refused_backward'])}" for r in results if r["refused_backward"]
    )
    report = {
        "seed": wish.seed,
        "density": wish.density,
        "memcheck": wish.memcheck,
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - began),
        "counts": dict(counted),
        "refusals": dict(reasons.most_common()),
        "results": results,
    }
    Path(wish.json).write_text(json.dumps(report, indent=1) + "\n")
    for reason, count in reasons.most_common(None if wish.refusals else 12):
        print(f"refused {count}x: {reason}")
    bad = sum(counted[status] for status in ("failed", "crashed", "silent"))
    words = ", ".join(f"{counted[status]} {status}" for status in ("passed", "failed", "crashed", "silent", "refused"))
    print(f"edge grid, seed {wish.seed}: {len(wanted)} problems; {words}; {report['seconds']} s; {wish.json}")
    return bad or int(not counted["passed"])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Edge sizes of every op on every backend.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ops", nargs="+", default=[])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=[])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--density", type=float, default=0.0)
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", default="edge_grid.json")
    parser.add_argument("--silence", type=float, default=0.0, help="seconds a problem may take")
    parser.add_argument("--load", default="", help="a Python file that workers run first")
    for flag in ("--list", "--memcheck", "--refusals", "--worker"):
        parser.add_argument(flag, action="store_true")
    wish = parser.parse_args(argv)
    wish.density = wish.density or (DENSITY_MEMCHECK if wish.memcheck else DENSITY)
    wish.silence = wish.silence or (SILENCE_MEMCHECK if wish.memcheck else SILENCE)
    unknown = sorted({*wish.ops} - {*contracts()})
    if unknown:
        parser.error(f"no ops named {', '.join(unknown)}; there are {', '.join(contracts())}")
    return wish


def _wanted(wish: argparse.Namespace) -> list[tuple[int, EdgeProblem]]:
    """(number, problem) of the shard: the number is the same whichever shard asks.  Ops take turns."""
    each = [problems(contracts()[name], wish.seed, wish.density) for name in wish.ops or contracts()]
    turns = [found[i] for i in range(max(map(len, each))) for found in each if i < len(found)]
    shard, count = (int(number) for number in wish.shard.split("/"))
    return [(i, problem) for i, problem in enumerate(turns) if i % count == shard]


def _kind(reason: str) -> str:
    """A reason without the sizes of one call, so that equal reasons are counted together."""
    words = reason.split(" Supported here", maxsplit=1)[0].split(" (", maxsplit=1)[0]
    return re.sub(r"\d+", "#", words)[:160]


def _work(wish: argparse.Namespace) -> int:
    """A worker: reads "number backend backend ..." from its input, answers with a line of JSON for each backend."""
    if wish.load:
        runpy.run_path(wish.load)
    known, device = dict(_wanted(wish)), torch.device(wish.device)
    device = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
    torch.set_num_threads(1)
    for line in sys.stdin:
        number, *backends = line.split()
        problem = known[int(number)]
        for backend in backends:
            print(f"{_SAID}at {backend}", flush=True)
            found = run_problem(contracts()[problem.op], problem, backend, device, judged=not wish.memcheck)
            dead = _broken(device)
            said = {"status": "crashed" if dead else found.status, "details": found.details + dead}
            print(f"{_SAID}{json.dumps({**said, 'refused_backward': found.refused_backward})}", flush=True)
            if dead:
                return 3  # the context is lost, and every later call would fail
    return 0


def _broken(device: torch.device) -> list[str]:
    """Why nothing can be launched in this process any more."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            return [f"the device is lost: {str(error).splitlines()[0]}"]
    return []


class _Run:
    """Workers, each fed by a thread that knows which problem it is at."""

    def __init__(self, wish: argparse.Namespace, wanted: list[tuple[int, EdgeProblem]]) -> None:
        self._wish, self._printing = wish, threading.Lock()
        self._results: list[dict[str, Any]] = []
        self._waiting: queue.SimpleQueue[tuple[int, EdgeProblem]] = queue.SimpleQueue()
        self._backends = wish.backends or (["cpu", "torch"] if wish.device == "cpu" else ["cuda", "triton", "cutile"])
        for each in wanted:
            self._waiting.put(each)
        self._threads = [threading.Thread(target=self._feed) for _ in range(min(wish.jobs, len(wanted)))]
        for thread in self._threads:
            thread.start()

    def finish(self) -> list[dict[str, Any]]:
        """Every result, in order of the problems."""
        for thread in self._threads:
            thread.join()
        return sorted(self._results, key=lambda result: (result["number"], result["backend"]))

    def _feed(self) -> None:
        worker = None
        while True:
            try:
                number, problem = self._waiting.get_nowait()
            except queue.Empty:
                if worker is not None:
                    worker.end()
                return
            backends = list(self._backends)
            while backends:
                worker = worker or _Worker(self._wish)
                answer = worker.ask(number, backends)
                self._note(number, problem, backends.pop(0), answer)
                if answer["status"] in ("crashed", "silent"):
                    worker.end(patience=0)
                    worker = None

    def _note(self, number: int, problem: EdgeProblem, backend: str, answer: dict[str, Any]) -> None:
        result = {"number": number, "op": problem.op, "problem": str(problem), "backend": backend, **answer}
        with self._printing:
            self._results.append(result)
            if answer["status"] not in ("passed", "refused"):
                words = "; ".join(answer["details"])[:900]
                print(f"{answer['status'].upper()} {number} [{backend}] {problem}: {words}", flush=True)


class _Worker:
    """A process that runs problems, under memcheck if asked."""

    def __init__(self, wish: argparse.Namespace) -> None:
        self._silence, self._memcheck = wish.silence, wish.memcheck
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        command = [sys.executable, __file__, "--worker", "--seed", str(wish.seed), "--device", wish.device]
        command += ["--density", str(wish.density), *(["--ops", *wish.ops] if wish.ops else [])]
        command += ["--load", wish.load] if wish.load else []
        env = dict(os.environ)
        if wish.memcheck:
            sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
            options = ["--tool", "memcheck", "--report-api-errors", "no", "--print-limit", "20"]
            command = [sanitizer, *options, *command, "--memcheck"]
            env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # an allocation for every tensor, of its very size
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        self._asked: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, number: int, backends: Sequence[str]) -> dict[str, Any]:
        """The answer for the first of `backends`; what is not asked for any more is asked for in the same breath."""
        if self._asked != [str(number), *backends]:
            self._asked = [str(number), *backends]
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(f"{number} {' '.join(backends)}\n")
                self._process.stdin.flush()
            except OSError:
                return self._died([])
        tool: list[str] = []
        while True:
            try:
                line = self._lines.get(timeout=self._silence)
            except queue.Empty:
                return {"status": "silent", "details": [f"no answer in {self._silence:g} s"], "refused_backward": None}
            if line is None:
                return self._died(tool)
            if not line.startswith(_SAID):
                tool.append(line.rstrip())
            elif not line.startswith(f"{_SAID}at "):
                answer: dict[str, Any] = json.loads(line.removeprefix(_SAID))
                self._asked = [self._asked[0], *self._asked[2:]]
                return self._with_tool(answer, tool)

    def end(self, patience: float = 20) -> None:
        """Let it go; what has not ended after `patience` seconds is killed, with the tool around it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=patience)
        except (OSError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._said.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _with_tool(self, answer: dict[str, Any], tool: list[str]) -> dict[str, Any]:
        """The answer, with what memcheck found while the problem ran."""
        found = [line for line in tool if line.startswith("=====") and not _FRAME.match(line)]
        if found and answer["status"] != "crashed":
            answer["status"] = "failed"
        answer["details"] = [*answer["details"], *found[:12]]
        return answer

    def _died(self, tool: Sequence[str]) -> dict[str, Any]:
        code = self._process.wait()
        self._said.seek(0)
        words = [*tool[-12:], self._said.read()[-_TAIL:].strip()]
        how = f"signal {-code}" if code < 0 else f"exit {code}"
        return {"status": "crashed", "details": [f"the process ended ({how})", *words], "refused_backward": None}


if __name__ == "__main__":
    sys.exit(min(1, main()))
