"""Times `auto` beside every peer on sizes off the grid: drawn from a seed, for all ops.

    python benchmarks/any_size.py --seed 7 --count 200 --json any_size.json [--budget SECONDS] [--resume]
    python benchmarks/any_size.py --seed 7 --count 200 --list       the problems alone
    python benchmarks/any_size.py --seed 7 --count 200 --plans      what `auto` takes on an H200, without a GPU

    python benchmarks/any_size.py --seed 7,8,9 --count 100 ... --only-auto --compile-jobs 12

Of several seeds the lists take turns, so that a budget cuts all of them alike; the summary is that of each and of all.
--only-auto times, of our implementations, the one that `auto` takes.  --compile-jobs first runs every problem once,
untimed, in so many processes: most of the time goes into compiling peers, which then come from their caches.

A budget holds for everything but the imports: a problem that it cuts off has no row.  Rows are written as they come, so
a run that is killed keeps them, and --resume measures the rest.

The same seed and count give the same list on any machine and Python.  The first problems of a longer list are those of
a shorter one, and `--ops` takes the problems of these ops from the same list.  A problem is a case of the bench: cold
L2, interleaved, checked before and after; `seed` stands in `params` of its row.

The mix, in `any_size_recipes.py`, `any_size_attention.py` and `any_size_parts.py`:
  ops         all, in cycles of 123: matmul and fmha six times, scaled_matmul four, grouped, varlen and weight_only
              three
  models      40 public configurations, equally often, on 1, 2, 4 or 8 GPUs: half of all draws on one
              (`any_size_models.json`, with sources)
  rows        1 to 64 of decoding in 35 of 100, odd ones (primes, 1500, 2000, 5000) in 30, powers of two from 128 in 35
  attention   prefill in 60 of 100, decoding in 20, a chunk behind a prefix in 12, an image over a text in 8; causal,
              full, and the windows, soft caps, sinks and documents of the models; heads in groups as they have them
  products    layers of the models: forward nt, gradients nn and tn (also added to float32), epilogues, float8
  dtypes      bf16 in six of ten, fp16 and fp32 in two each, where the op has them; attention has fp32 in one of ten
  directions  a backward in four of ten problems that training has, of ops whose bench has a backward
A problem fits when inputs and outputs are at most 2 GiB and its flops take about 8 ms; others are drawn again.  With
`--device cpu` the models are a sixteenth as wide, and the limits small.
"""

from __future__ import annotations

import argparse
import math
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from any_size_draw import CPU, GPU, problems
from any_size_plans import plans
from any_size_recipes import RECIPES

from tilewright.bench.machine import describe
from tilewright.bench.schema import Results, Row, appended, check_same_machine, load
from tilewright.bench.suite import compile_first, run
from tilewright.cli.options import device, names, seconds
from tilewright.cli.output import check_writable, write
from tilewright.errors import TilewrightError, UsageError
from tilewright.ops.attention.vendor import forget_signatures

SUITE = "any_size"
BEHIND = (0.97, 0.90)
WORST = 10


def summary(rows: Sequence[Row]) -> list[str]:
    """Lines on the best peer's time over that of `auto`: all rows, the worst, every op."""
    compared = [row for row in rows if row.ratio_auto is not None]
    lines = ["", f"{'op':<26}{'rows':>6}{'mean':>8}" + "".join(f"{f'<{limit}':>8}" for limit in BEHIND)]
    by_op: dict[str, list[float]] = defaultdict(list)
    for row in compared:
        by_op[row.op].append(row.ratio_auto or 0.0)
    lines += [_line(op, ratios) for op, ratios in sorted(by_op.items())]
    lines.append(_line("all", [ratio for ratios in by_op.values() for ratio in ratios]))
    worst = sorted(compared, key=lambda row: row.ratio_auto or 0.0)[:WORST]
    lines += ["", f"worst {len(worst)}: best peer / auto", *map(_named, worst)]
    if len(compared) < len(rows):
        lines += ["", f"{len(rows) - len(compared)} rows without a peer"]
    return lines


def summaries(rows: Sequence[Row]) -> list[str]:
    """The summary of each seed, where there are several, and of all rows."""
    by_seed: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_seed[row.params["seed"]].append(row)
    if len(by_seed) < 2:
        return summary(rows)
    lines = [line for seed, own in sorted(by_seed.items()) for line in ("", f"seed {seed}", *summary(own))]
    return [*lines, "", f"{len(by_seed)} seeds", *summary(rows)]


def _line(name: str, ratios: Sequence[float]) -> str:
    if not ratios:
        return f"{name:<26}{0:>6}"
    shares = "".join(f"{sum(ratio < limit for ratio in ratios) / len(ratios):>8.0%}" for limit in BEHIND)
    return f"{name:<26}{len(ratios):>6}{math.exp(sum(map(math.log, ratios)) / len(ratios)):>8.3f}{shares}"


def _named(row: Row) -> str:
    peer = min(row.peers, key=lambda name: row.peers[name])
    return (
        f"  {row.ratio_auto:.3f}  {row.op} {row.case} {row.dtype} {row.direction}: {row.chosen} "
        f"{row.impls[row.chosen]:.2f} us, {peer} {row.peers[peer]:.2f} us"
    )


def _earlier(options: argparse.Namespace) -> Results | None:
    """Rows of an earlier run in the file of --json, if --resume names any."""
    if not options.resume:
        return None
    if options.json is None:
        raise UsageError("--resume adds to the file of --json; give both.")
    if not options.json.exists():
        return None
    results = load(options.json)
    check_same_machine(results, describe(options.device).to_dict(), options.json)
    return results


@contextmanager
def _cut_off(budget: float | None) -> Iterator[None]:
    """Interrupt the block after so many seconds, as Ctrl-C does, which a suite ends on with the rows that it has."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, budget or 0.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _compile_in_processes(count: int) -> None:
    """This command in `count` processes, each of which compiles its part of the problems."""
    began = time.monotonic()
    command = [sys.executable, *sys.argv]
    running = [subprocess.Popen([*command, "--part", f"{part}/{count}"]) for part in range(count)]
    codes = [process.wait() for process in running]
    failed = sum(code != 0 for code in codes)
    print(f"compiled in {time.monotonic() - began:.0f} s by {count} processes, {failed} of which failed", flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="0", help="a number, or several, separated by commas")
    parser.add_argument("--count", type=int, default=200, help="number of problems of a seed")
    parser.add_argument("--ops", help="only these, separated by commas")
    parser.add_argument("--against", help="peers, separated by commas; default: all")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, cpu; decides the list, so the default is fixed")
    parser.add_argument("--budget", help="end after this time: 90s, 5m, 1h")
    parser.add_argument("--only-auto", action="store_true", help="of our implementations, time what `auto` takes")
    parser.add_argument("--compile-jobs", type=int, default=0, help="processes that compile first; default: none")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # I/N: compile every Nth problem from the Ith on, and end
    parser.add_argument("--json", type=Path, help="write bench JSON here, after every case")
    parser.add_argument("--resume", action="store_true", help="only problems that --json has no row of")
    parser.add_argument("--list", action="store_true", help="print the problems and run nothing")
    parser.add_argument("--plans", action="store_true", help="print what `auto` takes on an H200 and run nothing")
    return parser.parse_args(arguments)


def _seeds(text: str) -> list[int]:
    """Seeds of "7,8,9", each once."""
    parts = names(text) or []
    if not parts or not all(part.isdecimal() for part in parts):
        raise UsageError(f"--seed {text}: write a number, or several as 7,8,9.")
    return list(dict.fromkeys(map(int, parts)))


def _run(options: argparse.Namespace) -> int:
    ops = names(options.ops) or []
    if unknown := sorted(set(ops) - set(RECIPES)):
        raise UsageError(f"no op named {', '.join(unknown)}. Ops: {', '.join(RECIPES)}.")
    limits = CPU if options.device == "cpu" else GPU
    lists = [problems(seed, options.count, RECIPES, limits=limits, ops=ops) for seed in _seeds(options.seed)]
    drawn = [problem for taking_turns in zip(*lists, strict=True) for problem in taking_turns]
    if options.list:
        print(*drawn, sep="\n")
        return 0
    if options.plans:
        print(*plans(drawn), sep="\n")
        return 0
    check_writable(options.json)
    place, against = device(options.device), names(options.against)
    cases = [problem.case() for problem in drawn]
    if options.part is not None:
        first, step = map(int, options.part.split("/"))
        compile_first(cases[first::step], against, place, options.only_auto)
        return 0
    if options.compile_jobs:
        _compile_in_processes(options.compile_jobs)
    earlier = _earlier(options)

    def keep(results: Results) -> None:
        forget_signatures()  # cuDNN's share of a process is for the sizes of a model, and here every row is another
        if options.json is not None:
            write(options.json, (results if earlier is None else appended(earlier, results)).to_json() + "\n")

    budget = None if options.budget is None else seconds(options.budget)
    with _cut_off(budget):
        results = run(
            SUITE,
            cases=cases,
            against=against,
            without={row.key for row in earlier.rows} if earlier is not None else (),
            budget=budget,
            device=place,
            only_chosen=options.only_auto,
            progress=lambda line: print(line, flush=True),
            keep=keep,
        )
    keep(results)
    rows = results.rows if earlier is None else appended(earlier, results).rows
    print(*summaries(rows), sep="\n")
    if results.unbegun:
        print(f"{results.unbegun} problems not measured: --resume measures them")
    for note in results.failures:
        print(f"FAILED {note.op} {note.case} {note.dtype} {note.direction} {note.name}: {note.reason}")
    return 0 if results.ok else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, measure, print; the exit code is 1 if a row failed, 2 for wrong options."""
    try:
        return _run(_options(arguments))
    except TilewrightError as error:
        print(f"any_size: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("any_size: interrupted before the first problem", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
