"""Text of one table cell: rows, times, ratios and shares."""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.bench.schema import Row
from tilewright.bench.statistics import geometric_mean


def title(row: Row) -> str:
    """Name a row by op, case, dtype and direction."""
    return f"{row.op} {row.case} {row.dtype} {row.direction}"


def lost(row: Row) -> bool:
    """Is a peer faster than what `auto` picks?"""
    return row.ratio_auto is not None and row.ratio_auto < 1


def number(us: float) -> str:
    """Format microseconds."""
    return f"{us:.2f}" if us < 100 else f"{us:.1f}"


def ratio(value: float | None) -> str:
    """Format a ratio, bold below 1."""
    if value is None:
        return "-"
    return f"**{value:.3f}**" if value < 1 else f"{value:.3f}"


def mean(ratios: Iterable[float | None]) -> str:
    """Format the geometric mean of the ratios that exist."""
    values = [each for each in ratios if each is not None]
    return f"{geometric_mean(values):.3f}" if values else "-"


def share(part: float) -> str:
    """Format a share as percent."""
    return f"{100 * part:.0f} %"
