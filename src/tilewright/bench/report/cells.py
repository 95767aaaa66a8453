"""How rows and numbers are written in the pages' tables."""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.bench.schema import Row
from tilewright.bench.statistics import geometric_mean


def title(row: Row) -> str:
    """What identifies a row, in words."""
    return f"{row.op} {row.case} {row.dtype} {row.direction}"


def lost(row: Row) -> bool:
    """Is a peer faster than what `auto` picks?"""
    return row.ratio_auto is not None and row.ratio_auto < 1


def number(us: float) -> str:
    """Microseconds."""
    return f"{us:.2f}" if us < 100 else f"{us:.1f}"


def ratio(value: float | None) -> str:
    """Bold below 1."""
    if value is None:
        return "-"
    return f"**{value:.3f}**" if value < 1 else f"{value:.3f}"


def mean(ratios: Iterable[float | None]) -> str:
    """Geometric mean of those that exist."""
    known = [each for each in ratios if each is not None]
    return f"{geometric_mean(known):.3f}" if known else "-"


def share(part: float) -> str:
    """Percent."""
    return f"{100 * part:.0f} %"
