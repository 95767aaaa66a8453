"""The report as one self-contained HTML page: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from pathlib import Path

from tilewright.assistant.report import Report
from tilewright.errors import UsageError


def render(report: Report) -> str:
    """The page as text. Needs jinja2 and matplotlib (the extra `report`)."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup

        from tilewright.assistant.plots import all_plots

        plots = {name: Markup(svg) for name, svg in all_plots(report).items()}
    except ImportError as error:
        raise UsageError(f"the HTML report needs {error.name}: pip install 'tilewright[report]'.") from error
    folder = Path(__file__).parent / "templates"
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bytes"] = readable_bytes
    judged = [(record.name, record.accuracy) for record in report.changes if record.accuracy is not None]
    if report.accuracy is not None:
        judged.append(("everything that was kept", report.accuracy))
    return environment.get_template("report.html.j2").render(report=report, plots=plots, judged=judged)


def readable_bytes(count: float) -> str:
    """3.1 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
