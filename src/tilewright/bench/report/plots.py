"""The plots of the performance pages, as small PNG files: ratios around 1, as one line per row or as dots over M."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Bar:
    """Ratios of one row: best peer / our best kernel, and best peer / what `auto` picks."""

    label: str
    ratio_own: float | None
    ratio_auto: float | None


@dataclass(frozen=True, slots=True)
class Dot:
    """The same ratios of a matrix product with `m` rows."""

    m: int
    ratio_own: float | None
    ratio_auto: float | None


def scatter_plot(title: str, dots: Sequence[Dot], path: Path) -> None:
    """Write a PNG: ratios over M, a column for each M, with our best kernel on its left and `auto` on its right."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 8}):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        axes = figure.add_subplot()
        columns = {m: x for x, m in enumerate(sorted({dot.m for dot in dots}))}
        for shift, colour, label, points in (
            (-0.15, "#2a7f62", "our best kernel", [(d.m, d.ratio_own) for d in dots if d.ratio_own is not None]),
            (0.15, "#777777", "what auto picks", [(d.m, d.ratio_auto) for d in dots if d.ratio_auto is not None]),
        ):
            axes.scatter([columns[m] + shift for m, _ in points], [y for _, y in points], c=colour, s=12, label=label)
        axes.axhline(1, color="#888", linewidth=0.8)
        axes.set_yscale("log")
        ticks = _ticks([y for dot in dots for y in (dot.ratio_own, dot.ratio_auto) if y is not None])
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xticks(list(columns.values()), [str(m) for m in columns])
        axes.set_xlabel("M")
        axes.set_title(title, fontsize=9)
        axes.legend(loc="best", fontsize=7)
        _save(figure, path)


def ratio_plot(title: str, bars: Sequence[Bar], path: Path) -> None:
    """Write a PNG, a line for each label: a dot is the ratio of `auto`, a ring our best kernel's if it differs."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 8}):
        lines = {label: i for i, label in enumerate(dict.fromkeys(bar.label for bar in bars))}
        figure = Figure(figsize=(8, 1.2 + 0.18 * len(lines)), layout="constrained")
        axes = figure.add_subplot()
        auto_points = [(lines[bar.label], bar.ratio_auto) for bar in bars if bar.ratio_auto is not None]
        kernel_points = [
            (lines[bar.label], bar.ratio_own)
            for bar in bars
            if bar.ratio_own is not None and bar.ratio_own != bar.ratio_auto
        ]
        colours = ["#2a7f62" if ratio >= 1 else "#b3423a" for _, ratio in auto_points]
        axes.hlines([i for i, _ in auto_points], 1, [ratio for _, ratio in auto_points], colors=colours, linewidth=1)
        axes.scatter(
            [r for _, r in auto_points], [i for i, _ in auto_points], c=colours, s=14, label="what auto picks", zorder=3
        )
        axes.scatter(
            [r for _, r in kernel_points],
            [i for i, _ in kernel_points],
            facecolors="none",
            edgecolors="#444",
            s=30,
            label="our best kernel",
        )
        axes.axvline(1, color="#888", linewidth=0.8)
        axes.set_xscale("log")
        ticks = _ticks([r for _, r in (*auto_points, *kernel_points)])
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_yticks(list(lines.values()), list(lines))
        axes.invert_yaxis()
        axes.set_title(title, fontsize=9)
        axes.legend(loc="best", fontsize=7)
        _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """Save as a PNG of sixteen colours, half the size of an SVG."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=80, metadata={"Software": None})
    Image.open(buffer).convert("RGB").quantize(16, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


def _ticks(ratios: Sequence[float]) -> list[float]:
    """Round numbers that span the ratios, among them 1."""
    ticks = [0.1, 0.2, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0]
    low, high = min(*ratios, 0.95), max(*ratios, 1.05)
    inside = [tick for tick in ticks if low * 0.9 <= tick <= high * 1.1]
    coarse = {0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0}
    return inside if len(inside) <= 9 else [tick for tick in inside if tick in coarse]
