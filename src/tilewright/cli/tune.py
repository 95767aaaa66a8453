"""`tilewright tune`: find the fastest backend and configuration of ops on this machine, and remember them."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewright.cli.options import (
    BackendOption,
    DeviceOption,
    DirectionOption,
    DtypeOption,
    JsonOption,
    device,
    seconds,
)
from tilewright.cli.output import check_writable, emit, say
from tilewright.errors import UsageError

if TYPE_CHECKING:
    from tilewright.bench.cases import Case


class Search(StrEnum):
    """Order in which candidates are tried."""

    exhaustive = "exhaustive"
    random = "random"


def tune_ops(
    suite: Annotated[str, typer.Argument(metavar="SUITE|OP", help="norm, activation, ..., all, or one op.")],
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

    Candidates run in separate processes: one that is wrong, hangs or crashes is recorded and skipped.  The exit code is
    1 if a case has no correct candidate.
    """
    check_writable(json_file, table if table is None or not table.is_dir() else table / "op.json")
    place = device(device_name)
    budget_s, gain = None if budget is None else seconds(budget), _share(min_gain)
    import tilewright.ops  # noqa: F401  (binds the contracts)
    from tilewright.cli.case import sizes
    from tilewright.dispatch import contracts
    from tilewright.tuning import tune

    selected = [c for c in contracts().values() if suite in ("all", c.family, c.name)]
    with _progress() as progress:
        report = tune(
            suite,
            case=sizes(case, selected) if case else None,
            dtype=dtype and dtype.value,
            direction=None if direction is None else direction.value,
            backend=backend,
            device=place,
            search=search.value,
            budget=budget_s,
            min_gain=gain,
            path=table,
            seed=seed,
            progress=progress,
        )
    emit(report.to_dict(), str(report), json_file)
    if not report.ok:
        raise typer.Exit(1)


def _share(text: str) -> float:
    """0.03 from "3%" or "0.03"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    share = float("inf") if match is None else float(match[1]) / (100 if match[2] else 1)
    if share >= 1:
        raise UsageError(f"--min-gain {text}: write it as 3% or 0.03, below 100%.")
    return share


@contextmanager
def _progress() -> "Iterator[Callable[[int, int, Case, str, int, int], None]]":
    """Show progress: a bar on a terminal, elsewhere one line for each case."""
    if not sys.stderr.isatty():
        lines = set()

        def line(number: int, cases: int, case: "Case", what: str, finished: int, total: int) -> None:
            if number not in lines:
                lines.add(number)
                say(f"[{number + 1}/{cases}] {' '.join(case.key)}")

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
