"""`tilewright bench | calibrate`: measure."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewright.cli.options import DeviceOption, DirectionOption, DtypeOption, JsonOption, device, names, need, seconds
from tilewright.cli.output import check_writable, emit, say, write_json
from tilewright.errors import UsageError

if TYPE_CHECKING:
    from tilewright.bench.schema import Results


class Timing(StrEnum):
    """How timed calls follow each other: at once, or with a pause before each."""

    sustained = "sustained"
    paused = "paused"


def bench_suite(
    suite: Annotated[
        str | None,
        typer.Argument(
            metavar="[SUITE]",
            help="norm, activation, rope, softmax, dropout, gemm, gemm_fp8, gemm_int8, grouped, quant, weight_only, "
            "attention, decode, sampling, kvcache, moe, loss, optim, all, or an op.",
        ),
    ] = None,
    ops: Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Only these ops of the suite.")] = None,
    dtype: DtypeOption = None,
    case: Annotated[
        str | None, typer.Option("--case", metavar="SIZES", help="Only cases with these sizes: M=8192,N=4096.")
    ] = None,
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="PATTERNS", help="Only cases of these names: llama8b_*,*_m64.")
    ] = None,
    direction: DirectionOption = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="NAMES", help="Only these peers, separated by commas; default: all."),
    ] = None,
    timing: Annotated[
        Timing, typer.Option("--timing", help="Calls back to back, or each after an idle gap.")
    ] = Timing.sustained,
    device_name: DeviceOption = None,
    write_table: Annotated[
        bool, typer.Option("--write-table", help="Store the fastest choice of each case in a tuning table.")
    ] = False,
    table: Annotated[
        Path | None,
        typer.Option(
            "--table", metavar="FILE", help="Table to write, or a folder with a file per op; default: your own tables."
        ),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Render all committed results instead of measuring.")
    ] = False,
    results: Annotated[Path, typer.Option("--results", metavar="DIR", help="Results that --report reads.")] = Path(
        "benchmarks/results"
    ),
    output: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Folder of the pages that --report writes.")
    ] = Path("docs/performance"),
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="TIME", help="Begin no further case after this time: 90s, 5m, 1h.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the rows of the --json FILE, and measure only cases that it lacks.")
    ] = False,
    append: Annotated[
        bool, typer.Option("--append", help="Keep the rows of the --json FILE that this run does not measure.")
    ] = False,
    json_file: JsonOption = None,
) -> None:
    """Time our implementations and every available peer, interleaved in one process, checked before and after.

    The exit code is 1 if a case fails or is faster than its floor.
    """
    check_writable(json_file, table if table is None or not table.is_dir() else table / "op.json")
    if report:
        _render(suite, results, output, json_file)
        return
    import tilewright.ops  # noqa: F401  (binds the contracts)
    from tilewright.bench.cases import suites
    from tilewright.bench.schema import appended
    from tilewright.bench.suite import run
    from tilewright.bench.tables import write_table as store
    from tilewright.cli.case import sizes
    from tilewright.dispatch import contracts
    from tilewright.dispatch.tables.table import read

    if suite is None:
        raise UsageError(f"bench needs a SUITE: {', '.join(suites())} (or --report).")
    if table is not None and not write_table:
        raise UsageError("--table names the file for --write-table; give both.")
    if table is not None and table.is_file():
        read(table)  # rows are merged into it at the end; a file that is no table is refused now
    if suite in contracts() and suite not in suites():
        suite, ops = contracts()[suite].family, [suite, *(ops or ())]
    place = device(device_name)
    budget_s = None if budget is None else seconds(budget)
    earlier = _earlier(json_file, place) if append or resume else None
    selected = [c for c in contracts().values() if suite in ("all", c.family) and (not ops or c.name in ops)]

    def with_earlier(measured: "Results") -> str:
        return (measured if earlier is None else appended(earlier, measured)).to_json()

    measured = run(
        suite,
        ops or None,
        dtype and dtype.value,
        sizes(case, selected) if case else None,
        names(against),
        rows=names(rows),
        direction=None if direction is None else direction.value,
        without={row.key for row in earlier.rows} if resume and earlier is not None else (),
        budget=budget_s,
        device=place,
        timing=timing.value,
        progress=say if json_file == "-" else print,
        keep=None if json_file == "-" else lambda measured: write_json(with_earlier(measured), json_file),
    )
    write_json(with_earlier(measured), json_file)
    if measured.unbegun:
        left = measured.unbegun
        say(f"{left} cases not measured: the budget was used up, or you interrupted. --resume measures them.")
    for note in measured.failures:
        say(f"FAILED {note.op} {note.case} {note.dtype} {note.direction} {note.name}: {note.reason}")
    if not measured.ok:
        raise typer.Exit(1)
    if write_table:
        say(f"wrote {store(measured, table)}")


def _earlier(json_file: str | None, place: str) -> "Results | None":
    """Results in the file that --append or --resume add to; None if there is no file yet.

    Raises UsageError before anything is timed.
    """
    if json_file in (None, "-"):
        raise UsageError("--append and --resume add to the file of --json; give both.")
    from tilewright.bench.machine import describe
    from tilewright.bench.schema import check_same_machine, load

    path = Path(str(json_file))
    if not path.exists():
        return None
    results = load(path)
    check_same_machine(results, describe(place).to_dict(), path)
    return results


def _render(suite: str | None, results: Path, output: Path, json_file: str | None) -> None:
    if suite is not None:
        raise UsageError(f"--report renders every result file; it takes no SUITE, got {suite!r}.")
    check_writable(output / "README.md")
    need("report", "matplotlib")
    from tilewright.bench.report import report

    emit({"page": str(report(results, output))}, f"wrote {output}", json_file)


def calibrate_device(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points: a third of the time, larger errors.")] = False,
    device_name: DeviceOption = None,
    json_file: JsonOption = None,
) -> None:
    """Measure what this machine can do: bandwidth, matrix rate, attention, launch cost.

    The result is stored in the cache folder.  Predictions and floors of the assistant are computed from it.
    """
    place = device(device_name)
    from tilewright.bench.calibrate import calibrate
    from tilewright.hardware.ceilings import path_for

    check_writable(json_file, path_for(place))
    ceilings_measured = calibrate(place, quick=quick, progress=say)
    write_json(ceilings_measured.to_json(), json_file)
    if json_file != "-":
        print(f"{ceilings_measured.device}: stored in {path_for(place)}")
