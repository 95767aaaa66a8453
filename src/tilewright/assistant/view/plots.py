"""The report's four plots as inline SVG.

Text and axes take the page's own colour (`currentColor`), so that one file reads well on a light and on a dark page.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tilewright.assistant.document import ChangeRecord, Document
from tilewright.assistant.observation.observe import Phase
from tilewright.assistant.view.labels import label

BEFORE, AFTER, GOOD, BAD, NEUTRAL = "#4878cf", "#e0883a", "#2f9e6e", "#d1495b", "#9aa3ad"
_INK = "#010203"  # stands for the page's text colour until the SVG is written
_SHOWN_CLASSES = 10


def all_plots(report: Document) -> dict[str, str]:
    """Plot name -> SVG text; a plot without data is left out."""
    plots = {"time": time_by_module, "roofline": roofline, "accuracy": accuracy, "gains": gains}
    drawn = {name: draw(report) for name, draw in plots.items()}
    return {name: svg for name, svg in drawn.items() if svg}


def time_by_module(report: Document) -> str:
    """Own time of each module class in one prefill, before and after; right: what a request is made of."""
    old = _by_class(report.before.phase("prefill"))
    new = _by_class(report.after.phase("prefill")) if report.after is not None else {}
    if not old:
        return ""
    names = [
        name
        for name, _ in Counter({n: max(old.get(n, 0), new.get(n, 0)) for n in {*old, *new}}).most_common(_SHOWN_CLASSES)
    ][::-1]
    with _figure("time", (9.0, 0.36 * len(names) + 1.3), columns=2 if _request_parts(report) else 1, widths=(3, 1)) as (
        figure,
        axes,
    ):
        left = axes[0]
        height = 0.38 if new else 0.7
        for row, name in enumerate(names):
            left.barh(
                row + (height / 2 if new else 0),
                old.get(name, 0) / 1e3,
                height,
                color=BEFORE,
                label="before" if row == 0 else None,
            )
            if new:
                left.barh(
                    row - height / 2, new.get(name, 0) / 1e3, height, color=AFTER, label="after" if row == 0 else None
                )
        left.set_yticks(range(len(names)), names)
        left.set_xlabel("own time in one prefill, ms")
        left.legend(frameon=False, labelcolor=_INK, loc="lower right")
        if _request_parts(report):
            _draw_request(axes[1], report)
        return _svg("time", figure)


def roofline(report: Document) -> str:
    """Left: achieved flop/s over intensity under the measured roofs. Right: time over floor."""
    rated = [roof for roof in report.roofs if roof.flops and roof.us and roof.bytes]
    floored = [roof for roof in report.roofs if roof.floor_us and roof.us]
    if not floored:
        return ""
    marks = {"prefill": "o", "decode": "s"}
    with _figure("roofline", (9.0, 3.9), columns=2, widths=(1, 1)) as (figure, axes):
        left, right = axes
        _draw_roofs(left, report, [roof.flops / roof.bytes for roof in rated])
        for roof in rated:
            left.scatter(
                roof.flops / roof.bytes,
                roof.flops / roof.us / 1e6,
                marker=marks.get(roof.phase, "^"),
                color=BEFORE,
                s=26,
                zorder=3,
            )
        left.set(xscale="log", yscale="log", xlabel="flop per byte", ylabel="Tflop/s")
        left.margins(0.15)
        for roof in floored:
            right.scatter(roof.floor_us, roof.us, marker=marks.get(roof.phase, "^"), color=BEFORE, s=26, zorder=3)
        ends = [min(roof.floor_us for roof in floored) / 2, max(roof.us for roof in floored) * 2]
        right.plot(ends, ends, color=NEUTRAL, linewidth=1)
        right.set(
            xscale="log", yscale="log", xlabel="floor, us", ylabel="measured, us (circle: prefill, square: decode)"
        )
        right.margins(0.15)
        points = [(roof.flops / roof.bytes, roof.flops / roof.us / 1e6) for roof in rated]
        label(left, points, [roof.module_class for roof in rated])
        label(right, [(roof.floor_us, roof.us) for roof in floored], [roof.module_class for roof in floored])
        return _svg("roofline", figure)


def accuracy(report: Document) -> str:
    """Logit error of every change that got as far as the gate, with the unchanged model's own error and the limit."""
    judged = [record for record in report.changes if record.accuracy is not None][::-1]
    if not judged:
        return ""
    positive = [
        value
        for record in judged
        if (result := record.accuracy) is not None
        for value in (result.error, result.own_error, result.error_limit)
        if 0 < value < math.inf
    ]
    least, most = min(positive, default=1e-8) / 3, max(positive, default=1e-7) * 3
    with _figure("accuracy", (9.0, 0.34 * len(judged) + 1.2)) as (figure, axes):
        axis = axes[0]
        for row, record in enumerate(judged):
            result = record.accuracy
            assert result is not None
            colour = GOOD if result.passed else BAD
            if result.error != 0:  # what is not finite stands at the right end
                axis.scatter(min(most, result.error), row, color=colour, s=42, zorder=3)
            else:  # a logarithmic axis has no zero
                axis.annotate(
                    "0: bit for bit", (0.01, row), xycoords=("axes fraction", "data"), color=colour, va="center"
                )
            for value, line, name in (
                (result.own_error, BEFORE, "unchanged model"),
                (result.error_limit, NEUTRAL, "limit"),
            ):
                if value > 0:
                    axis.plot(
                        [value] * 2,
                        [row - 0.35, row + 0.35],
                        color=line,
                        linewidth=2,
                        label=name if row == 0 else None,
                    )
        axis.set_yticks(range(len(judged)), [record.name for record in judged])
        axis.set(
            xscale="log",
            xlabel="relative logit error against the wide reference",
            xlim=(least, most),
            ylim=(-0.6, len(judged) - 0.4),
        )
        axis.legend(frameon=False, labelcolor=_INK, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return _svg("accuracy", figure)


def gains(report: Document) -> str:
    """Predicted range and measured gain with its interval, change by change."""
    shown = [record for record in report.changes if record.predicted is not None][::-1]
    if not shown:
        return ""
    with _figure("gains", (9.0, 0.38 * len(shown) + 1.2)) as (figure, axes):
        axis = axes[0]
        for row, record in enumerate(shown):
            assert record.predicted is not None
            low, high = record.predicted.low, record.predicted.high
            axis.barh(
                row,
                max(high - low, 0.004),
                left=low,
                height=0.5,
                color=NEUTRAL,
                alpha=0.45,
                label="predicted range" if row == 0 else None,
            )
            _draw_measured(axis, row, record)
        axis.axvline(1.0, color=_INK, linewidth=0.8)
        axis.set_yticks(range(len(shown)), [f"{record.name} ({record.decision})" for record in shown])
        axis.set_xlabel("speed-up of a request: old time / new time")
        axis.legend(frameon=False, labelcolor=_INK, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return _svg("gains", figure)


def _draw_measured(axis: Any, row: int, record: ChangeRecord) -> None:
    if record.measured is None:
        return
    gain = record.measured.decisive
    around = [[gain.gain - gain.gain_low], [gain.gain_high - gain.gain]]
    axis.errorbar(
        gain.gain, row, xerr=around, fmt="o", markersize=5, capsize=3, color=GOOD if record.decision == "kept" else BAD
    )


def _draw_roofs(axis: Any, report: Document, intensities: list[float]) -> None:
    measured = report.machine["ceilings"]
    peak = measured.get(f"matmul_{report.before.dtype}_flop_per_s")
    bandwidth = measured.get("copy_bytes_per_s")
    if not peak or not bandwidth:
        return
    knee = peak / bandwidth
    ends = sorted([knee, min([*intensities, knee]) / 2, max([*intensities, knee]) * 2])
    axis.plot(ends, [min(peak, x * bandwidth) / 1e12 for x in ends], color=NEUTRAL, linewidth=1.2)


def _draw_request(axis: Any, report: Document) -> None:
    for column, (name, parts) in enumerate(_request_parts(report).items()):
        prefill, decode = parts
        axis.bar(column, prefill, 0.6, color=BEFORE if name == "before" else AFTER)
        axis.bar(column, decode, 0.6, bottom=prefill, color=BEFORE if name == "before" else AFTER, alpha=0.55)
        axis.annotate(f"{prefill + decode:.3g}", (column, prefill + decode), ha="center", va="bottom", fontsize=7.5)
    axis.set_xticks(range(2), ["before", "after"])
    axis.set_ylabel("request, ms (dark: prefill)")
    axis.margins(y=0.15)


def _request_parts(report: Document) -> dict[str, tuple[float, float]]:
    """before and after -> (prefill ms, decoding ms) of one request; empty where that was not measured."""
    metrics = {metric.name: metric for metric in report.totals.metrics} if report.totals is not None else {}
    if "prefill" not in metrics or "request" not in metrics:
        return {}
    prefill, request = metrics["prefill"], metrics["request"]
    return {
        "before": (prefill.before, max(0.0, request.before - prefill.before)),
        "after": (prefill.after, max(0.0, request.after - prefill.after)),
    }


def _by_class(phase: Phase | None) -> dict[str, float]:
    own_us: dict[str, float] = {}
    if phase is None:
        return own_us
    for module in phase.modules:
        us = max(0.0, module.self_us) * phase.stretch
        own_us[module.module_class] = own_us.get(module.module_class, 0.0) + us
    return own_us


@contextmanager
def _figure(
    name: str, size: tuple[float, float], columns: int = 1, widths: tuple[int, ...] = (1,)
) -> Iterator[tuple[Any, Any]]:
    """A figure made without pyplot: nothing global is registered, and no display is looked for."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    ink = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK)
    rules = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.size": 8.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        **ink,
    }
    with mpl.rc_context(rules):
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots(1, columns, squeeze=False, width_ratios=widths[:columns])[0]
        for axis in axes:
            axis.patch.set_alpha(0)
        yield figure, axes


def _svg(name: str, figure: Any) -> str:
    """The figure as an <svg> element whose ids are its own: several live in one page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
