"""The report as one self-contained HTML page: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tilewright.assistant.document import Document
from tilewright.assistant.view.plots import all_plots
from tilewright.errors import UsageError


def render(report: Document) -> str:
    """The page as text. Needs jinja2 and matplotlib (the extra `report`)."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup

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
    return environment.get_template("report.html.j2").render(
        report=report, plots=plots, judged=judged, cards=cards(report)
    )


@dataclass(frozen=True)
class Card:
    """One number of the first screen."""

    value: str
    name: str
    detail: str


def cards(report: Document) -> list[Card]:
    """What a reader wants to know first: the gains, decoding among them, and the accuracy."""
    shown = [
        Card(f"{m.gain:.2f}x", m.name, f"{m.before:.4g} to {m.after:.4g} {m.unit}")
        for m in (report.totals.metrics if report.totals is not None else [])
    ]
    if (a := report.accuracy) is not None:
        error = f"{a.error:.2e}" if a.error else "0"
        shown.append(Card(error, "logit error", f"{a.own_error:.2e} before; limit {a.error_limit:.2e}"))
        shown.append(Card(f"{a.top1:.2%}", "top-1", f"{a.own_top1:.2%} before; {a.positions} positions"))
        if a.decode_agreement is not None and a.own_decode_agreement is not None:
            before = f"{a.own_decode_agreement:.2%} before; {a.decoded} tokens"
            shown.append(Card(f"{a.decode_agreement:.2%}", "decoding agrees", before))
        if a.perplexity is not None and a.own_perplexity is not None:
            shown.append(Card(f"{a.perplexity:.4g}", "perplexity", f"{a.own_perplexity:.4g} before"))
    return shown


def readable_bytes(count: float) -> str:
    """3.1 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
