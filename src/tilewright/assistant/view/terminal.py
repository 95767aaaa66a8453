"""The report in a terminal: rich tables, and a progress line while the loop runs."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tilewright.assistant.report import ChangeRecord, Report
from tilewright.assistant.timing.measure import Comparison
from tilewright.assistant.verify import Accuracy

_STYLE = {
    "kept": "bold green",
    "rejected": "yellow",
    "not judged": "magenta",
    "proposed": "cyan",
    "not tried": "dim",
    "not applicable": "dim",
}
_SHOWN_CLASSES = 8
_SHOWN_LINES = 20  # of foreign output, when a run fails


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str], None]]:
    """A function to hand to `optimize(progress=...)`: a live line in a terminal, plain lines in a log file.

    Both show the elapsed time. What compilers and libraries write meanwhile to the process's own streams, their
    subprocesses too, goes into a file (`foreign_output`).
    """
    with foreign_output(console):
        if not console.is_terminal:
            began = time.monotonic()
            yield lambda line: console.print(
                f"{time.monotonic() - began:6.1f} s  {line}", markup=False, highlight=False, soft_wrap=True
            )
            return
        columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.fields[line]}"))
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=None, line="starting")
            yield lambda line: bar.update(task, advance=1, line=escape(line))


@contextmanager
def foreign_output(console: Console) -> Iterator[None]:
    """Keep descriptors 1 and 2 for `console` and for Python's own streams; what others write there is shown only when
    the block fails, its last lines.
    """
    if not _owns_descriptors():
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    copies = os.dup(1), os.dup(2)
    python_out, python_err, console_file = sys.stdout, sys.stderr, console.file
    with tempfile.TemporaryFile() as noise, os.fdopen(os.dup(2), "w", buffering=1) as stream:
        os.dup2(noise.fileno(), 1)
        os.dup2(noise.fileno(), 2)
        console.file = sys.stdout = sys.stderr = stream
        failed = True
        try:
            yield
            failed = False
        finally:
            python_out.flush()
            python_err.flush()
            stream.flush()
            for descriptor, copy in enumerate(copies, start=1):
                os.dup2(copy, descriptor)
                os.close(copy)
            sys.stdout, sys.stderr, console.file = python_out, python_err, console_file
            if failed:
                noise.seek(0)
                lines = noise.read().decode(errors="replace").splitlines(keepends=True)
                python_err.writelines(lines[-_SHOWN_LINES:])


def _owns_descriptors() -> bool:
    """Whether Python's streams are the process's: not so under a test's capture, or in a notebook."""
    try:
        return (sys.stdout.fileno(), sys.stderr.fileno()) == (1, 2)
    except (AttributeError, OSError, ValueError):
        return False


def show(report: Report, console: Console) -> None:
    """Print the whole report."""
    console.print(render(report))


def render(report: Report) -> RenderableType:
    """All tables of a report."""
    parts: list[RenderableType] = [Panel(Text(report.headline, style="bold"), expand=False)]
    if report.totals is not None:
        parts.append(_totals("Unchanged against final model", report.totals))
    if report.accuracy is not None:
        parts.append(Text(_accuracy(report.accuracy)))
    if report.code:
        parts.append(Panel(Text(report.code), title="The same in your own program", title_align="left", expand=False))
    parts.append(_where_time_goes(report))
    if report.control is not None:
        noise = report.control.decisive
        interval = f"95 %: {noise.gain_low:.3f} to {noise.gain_high:.3f}"
        clock = " by CPU time, as other processes are at work" if report.control.clock == "cpu" else ""
        parts.append(Text(f"Two unchanged models differ by {noise.gain:.3f}x ({interval}) here{clock}.", style="dim"))
    parts.extend((_changes(report.changes), _reasons(report.changes)))
    parts.extend(Text(f"Note: {note}", style="dim") for note in report.notes)
    return Group(*parts)


def _where_time_goes(report: Report) -> Table:
    table = Table(title="Where the time goes, before", title_justify="left")
    for name in ("phase", "module class", "calls", "ms", "floor ms", "time / floor"):
        table.add_column(name, justify="left" if name in ("phase", "module class") else "right")
    for phase in report.before.phases:
        shown = [roof for roof in report.roofs if roof.phase == phase.name and roof.us > 0][:_SHOWN_CLASSES]
        for roof in shown:
            above = f"{roof.us / roof.floor_us:.1f}" if roof.floor_us else "-"
            floor = f"{roof.floor_us / 1e3:.3f}" if roof.floor_us else "-"
            table.add_row(phase.name, roof.module_class, str(roof.calls), f"{roof.us / 1e3:.3f}", floor, above)
        idle = "" if phase.idle_share is None else f", idle {phase.idle_share:.0%}"
        table.add_row(
            phase.name,
            f"all ({phase.kernels} ops{idle})",
            "",
            f"{phase.wall_us / 1e3:.3f}",
            "",
            "",
            style="bold",
            end_section=True,
        )
    return table


def _totals(title: str, comparison: Comparison) -> Table:
    table = Table(title=f"{title} ({comparison.rounds} rounds)", title_justify="left")
    for name in ("", "before", "after", "unit", "gain (95 %)"):
        table.add_column(name, justify="left" if name in ("", "unit") else "right")
    for m in comparison.metrics:
        table.add_row(
            m.name,
            f"{m.before:.4g}",
            f"{m.after:.4g}",
            m.unit,
            f"{m.gain:.2f}x ({m.gain_low:.2f} to {m.gain_high:.2f})",
        )
    return table


def _changes(records: list[ChangeRecord]) -> Table:
    table = Table(title="Changes", title_justify="left")
    for name in ("change", "decision", "predicted", "measured (95 %)"):
        table.add_column(name, no_wrap=True)
    for record in records:
        predicted = f"{record.predicted.low:.2f}x to {record.predicted.high:.2f}x" if record.predicted else "-"
        measured = "-"
        if record.measured is not None:
            gain = record.measured.decisive
            measured = f"{gain.gain:.3f}x ({gain.gain_low:.3f} to {gain.gain_high:.3f})"
        table.add_row(record.name, Text(record.decision, style=_STYLE[record.decision]), predicted, measured)
    return table


def _reasons(records: list[ChangeRecord]) -> Text:
    """One line a change, under the table: sentences do not fit a narrow column."""
    text = Text()
    for record in records:
        text.append(f"{record.name} ", style="bold")
        text.append(f"{record.decision}", style=_STYLE[record.decision])
        text.append(f": {record.reason}\n")
    return text


def _accuracy(a: Accuracy) -> str:
    line = f"Accuracy of the final model (of the unchanged one): logit error {a.error:.2e} ({a.own_error:.2e})"
    line += f", top-1 {a.top1:.2%} ({a.own_top1:.2%})"
    if a.perplexity is not None and a.own_perplexity is not None:
        line += f", perplexity {a.perplexity:.3f} ({a.own_perplexity:.3f})"
    return f"{line}; {a.positions} positions."
