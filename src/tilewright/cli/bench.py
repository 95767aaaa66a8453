"""`tilewright bench | calibrate`: measure."""

from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.op import DeviceOption, DtypeOption, _device
from tilewright.cli.output import JsonOption, check_writable, emit, parse_case, say
from tilewright.errors import UsageError


def add(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("bench")(bench)
    app.command("calibrate")(calibrate_device)


def bench(
    suite: Annotated[
        str | None, typer.Argument(metavar="[SUITE]", help="norm, activation, rope, softmax or all.")
    ] = None,
    op: Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Only these ops of the suite.")] = None,
    dtype: DtypeOption = None,
    case: Annotated[str | None, typer.Option("--case", help="Only cases with these sizes, e.g. M=8192,N=4096.")] = None,
    against: Annotated[
        str | None, typer.Option("--against", help="Peers by name, separated by commas; default: all.")
    ] = None,
    timing: Annotated[
        str, typer.Option("--timing", help="sustained (back to back) or paused (idle gaps).")
    ] = "sustained",
    device: DeviceOption = None,
    write_table: Annotated[bool, typer.Option("--write-table", help="Store the fastest choice of each case.")] = False,
    table: Annotated[Path | None, typer.Option("--table", help="The table to write; default: yours.")] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Render all committed results instead of measuring.")
    ] = False,
    results: Annotated[Path, typer.Option("--results", help="Folder of results for --report.")] = Path(
        "benchmarks/results"
    ),
    output: Annotated[Path, typer.Option("--output", help="Page that --report writes.")] = Path("docs/performance.md"),
    json_file: JsonOption = None,
) -> None:
    """Time our implementations and every available peer, interleaved in one process, checked before and after."""
    if report:
        from tilewright.bench.report import report as render

        emit({"page": str(render(results, output))}, f"wrote {output}", json_file)
        return
    if suite is None:
        raise UsageError("bench needs a SUITE: norm, activation, rope, softmax or all (or --report).")
    if timing not in ("sustained", "paused"):
        raise UsageError(f"--timing {timing}: allowed are sustained and paused.")
    if table is not None and not write_table:
        raise UsageError("--table names the file for --write-table; give both.")
    check_writable(json_file, table)
    import tilewright.ops  # noqa: F401  (binds the contracts)
    from tilewright.bench.suite import run
    from tilewright.bench.tables import write_table as store

    found = run(
        suite, op or None, dtype, parse_case(case), against.split(",") if against else None,
        device=_device(device), timing=timing, progress=say,  # type: ignore[arg-type]
    )  # fmt: skip
    if json_file == "-":
        print(found.to_json())
    elif json_file is not None:
        found.save(Path(json_file))
    for note in found.failures:
        say(f"FAILED {note.op} {note.case} {note.dtype} {note.direction} {note.name}: {note.reason}")
    if not found.ok:
        raise typer.Exit(1)
    if write_table:
        say(f"wrote {store(found, table)}")


def calibrate_device(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points: a third of the time, larger errors.")] = False,
    device: DeviceOption = None,
    json_file: JsonOption = None,
) -> None:
    """Measure what this machine can do: bandwidth, matrix rate, attention, launch cost.  Predictions rest on it."""
    check_writable(json_file)
    from dataclasses import asdict

    from tilewright.bench.calibrate import calibrate

    found = calibrate(_device(device), quick=quick, progress=say)
    lines = [f"{found.device}: stored in the cache folder; predictions use it from now on"]
    lines += [
        f"  {kind}: median error {e['median_percent']:.1f} % on held-out shapes" for kind, e in found.held_out.items()
    ]
    emit(asdict(found), "\n".join(lines), json_file)
