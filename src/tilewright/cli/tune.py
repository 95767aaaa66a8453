"""`tilewright tune`: find the fastest backend and configuration of ops on this machine, and remember them."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.cli.options import (
    BackendOption,
    DeviceOption,
    DirectionOption,
    DtypeOption,
    JsonOption,
    device,
    lengths,
    seconds,
)
from tilewright.cli.output import check_writable, emit, say
from tilewright.errors import UsageError

if TYPE_CHECKING:
    from tilewright.bench.cases import Case
    from tilewright.tuning import Report

    Progress = Callable[[int, int, Case, str, int, int], None]


class Search(StrEnum):
    """Order in which candidates are tried."""

    exhaustive = "exhaustive"
    random = "random"


def tune_ops(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="SUITE|OP|MODEL",
            help="norm, activation, ..., all; one op; or a model as optimize takes it: a folder, FILE.py:FACTORY.",
        ),
    ],
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="TIME", help="Time for all cases: 90s, 5m, 1h; default: no limit.")
    ] = None,
    min_gain: Annotated[
        str,
        typer.Option("--min-gain", metavar="SHARE", help="Gain that a new choice needs to replace the present one."),
    ] = "3%",
    case: Annotated[
        str | None, typer.Option("--case", metavar="SIZES", help="Only cases with these sizes: M=8192,N=4096.")
    ] = None,
    dtype: DtypeOption = None,
    direction: DirectionOption = None,
    backend: BackendOption = None,
    search: Annotated[
        Search, typer.Option("--search", help="The declared order, or a random one for a short budget.")
    ] = Search.exhaustive,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", metavar="LENGTHS", help="Lengths of a model's prefills; default: 1024,1000."),
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option("--new-tokens", min=0, help="Tokens a model decodes after each; default: 128.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Sequences in a model's calls; default: 1.")
    ] = None,
    fp8: Annotated[bool, typer.Option("--fp8", help="A model's linear layers in float8, as patch(fp8=True).")] = False,
    device_name: DeviceOption = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Seed of the random inputs; default: a fresh one.")
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(
            "--table", metavar="FILE", help="Table to write, or a folder with a file per op; default: your own tables."
        ),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Compile, check and time every candidate of each case, and write those that are faster into the tuning table.

    The cases of a model are the sizes that it runs, those with the most time first; a size that was measured on this
    machine with the present versions is left out, so a second run goes on where the first one ended.  Candidates run in
    separate processes: one that is wrong, hangs or crashes is recorded and skipped.  The exit code is 1 if a case has
    no correct candidate.
    """
    check_writable(json_file, table if table is None or not table.is_dir() else table / "op.json")
    place = device(device_name)
    common = {
        "backend": backend,
        "search": search.value,
        "budget": None if budget is None else seconds(budget),
        "min_gain": _share(min_gain),
        "path": table,
        "seed": seed,
    }
    of_op = {"--case": case, "--dtype": dtype, "--direction": direction}
    of_model = {"--tokens": tokens, "--new-tokens": new_tokens, "--batch": batch, "--fp8": fp8 or None}
    is_model = _names_model(subject)
    try:
        if is_model:
            _refuse(of_op, f"is for a suite or an op, and {subject} is a model")
            request = {"tokens": None if tokens is None else lengths(tokens), "new_tokens": new_tokens, "batch": batch}
            options = {**common, "fp8": fp8, **{name: value for name, value in request.items() if value is not None}}
            report = _tune_model(subject, place, options)
        else:
            _refuse(of_model, f"is for a model, and {subject} is no path to one")
            half = None if direction is None else direction.value
            report = _tune_ops(subject, place, case, {"dtype": dtype and dtype.value, "direction": half, **common})
    except KeyboardInterrupt:
        rest = "; the same command goes on with the rest" if is_model else ""
        say(f"interrupted: the table keeps what was measured{rest}.")
        raise typer.Exit(130) from None
    emit(report.to_dict(), str(report), json_file)
    if not report.ok:
        raise typer.Exit(1)


def _names_model(subject: str) -> bool:
    """True for what looks like a path.  A folder that has the name of an op or a suite is written ./norm."""
    if subject.rpartition(":")[0].endswith(".py") or os.sep in subject:
        return True
    from tilewright.bench.cases import known_contracts, suites

    if subject in known_contracts() or subject in suites():
        return False
    if Path(subject).is_dir():
        return True
    raise UsageError(
        f"{subject!r} is no op (`tilewright ops` lists them), no suite ({', '.join(suites())}) and no model folder."
    )


def _refuse(options: Mapping[str, object], reason: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"{name} {reason}.")


def _tune_ops(suite: str, place: str, case: str | None, options: dict[str, Any]) -> "Report":
    import tilewright.ops  # noqa: F401  (binds the contracts)
    from tilewright.cli.case import sizes
    from tilewright.dispatch import contracts
    from tilewright.tuning import tune

    selected = [c for c in contracts().values() if suite in ("all", c.family, c.name)]
    with _progress() as progress:
        return tune(suite, case=sizes(case, selected) if case else None, device=place, progress=progress, **options)


def _tune_model(name: str, place: str, options: dict[str, Any]) -> "Report":
    from tilewright.assistant import inputs, load
    from tilewright.tuning import tune_model
    from tilewright.warmup.requests import is_language_model

    with redirect_stdout(sys.stderr):  # what a factory or a model prints must not mix with the JSON
        loaded = load.load(name, device=place)
        say(f"running {name} to record its sizes")
        example = None if {"tokens", "batch"} & options.keys() else loaded.inputs
        if not is_language_model(loaded.model):
            example = inputs.make(loaded.model, loaded.tokenizer).inputs if loaded.inputs is None else loaded.inputs
        with _progress() as progress:
            return tune_model(loaded.model, example, progress=progress, **options)


def _share(text: str) -> float:
    """0.03 from "3%" or "0.03"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    share = float("inf") if match is None else float(match[1]) / (100 if match[2] else 1)
    if share >= 1:
        raise UsageError(f"--min-gain {text}: write it as 3% or 0.03, below 100%.")
    return share


@contextmanager
def _progress() -> "Iterator[Progress]":
    """Show progress: a bar on a terminal, elsewhere one line for each case, with the time since the first."""
    if not sys.stderr.isatty():
        lines = set()
        began = time.monotonic()

        def line(number: int, cases: int, case: "Case", what: str, finished: int, total: int) -> None:
            if number not in lines:
                lines.add(number)
                say(f"[{number + 1}/{cases}] {' '.join(case.key)} ({time.monotonic() - began:.0f} s)")

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        all_cases, part = bars.add_task("cases", total=None), bars.add_task("", total=None)

        def bar(number: int, cases: int, case: "Case", what: str, finished: int, total: int) -> None:
            bars.update(all_cases, description="cases", completed=number, total=cases)
            bars.update(part, description=f"{' '.join(case.key)}: {what}", completed=finished, total=total)

        yield bar
