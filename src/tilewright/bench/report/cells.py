"""How numbers are written in the page's tables."""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.bench.statistics import geometric_mean


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
    values = [each for each in ratios if each is not None]
    return f"{geometric_mean(values):.3f}" if values else "-"


def share(part: float) -> str:
    """Percent."""
    return f"{100 * part:.0f} %"
