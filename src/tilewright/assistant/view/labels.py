"""Place the labels of a plot such that none covers another one, or a point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_FONT_SIZE = 6.5
_CHARACTER = 0.62  # widest width of a character over the font size, in the fonts that browsers take for sans-serif
_DISTANCES = (5.0, 11.0, 18.0, 26.0, 36.0, 48.0, 62.0)  # from the point, in points
_DIRECTIONS = ((1, 0), (1, 1), (1, -1), (0, 1), (0, -1), (-1, 0), (-1, 1), (-1, -1))
_MARKER = 4.0  # half a marker's width


@dataclass(frozen=True)
class Box:
    """A rectangle in points, y upwards."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Box) -> bool:
        """Whether they share an area."""
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )

    def within(self, other: Box) -> bool:
        """Whether it lies inside of `other`."""
        return (
            self.left >= other.left
            and self.right <= other.right
            and self.bottom >= other.bottom
            and self.top <= other.top
        )


def place(points: Sequence[tuple[float, float]], texts: Sequence[str], area: Box) -> list[Box | None]:
    """A box for each text near its point, both in points; None where every place is taken."""
    occupied = [Box(x - _MARKER, y - _MARKER, x + _MARKER, y + _MARKER) for x, y in points]
    boxes: list[Box | None] = []
    for (x, y), text in zip(points, texts, strict=True):
        free = next((box for box in _around(x, y, text) if box.within(area) and not _hit(box, occupied)), None)
        boxes.append(free)
        if free is not None:
            occupied.append(free)
    return boxes


def label(axis: Any, points: Sequence[tuple[float, float]], texts: Sequence[str]) -> None:
    """Label points of a finished plot, given in its data coordinates; a line leads to a label that stands farther off.

    A text that finds no place is left out: its point has a row in the table below the plot.
    """
    axis.figure.draw_without_rendering()  # scales and the layout are known from here on
    scale = 72 / axis.figure.dpi
    frame = axis.get_window_extent()
    area = Box(frame.x0 * scale, frame.y0 * scale, frame.x1 * scale, frame.y1 * scale)
    places = [tuple(float(v) * scale for v in axis.transData.transform(point)) for point in points]
    boxes = place([(x, y) for x, y in places], texts, area)
    for point, (x, y), text, box in zip(points, places, texts, boxes, strict=True):
        if box is None:
            continue
        far = max(box.left - x, x - box.right, box.bottom - y, y - box.top) > _DISTANCES[1]
        axis.annotate(
            text,
            point,
            xytext=(box.left - x, box.bottom - y + 0.2 * _FONT_SIZE),
            textcoords="offset points",
            fontsize=_FONT_SIZE,
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "alpha": 0.5} if far else None,
        )


def box_of(x: float, y: float, text: str, size: float = _FONT_SIZE) -> Box:
    """The box of a text whose baseline begins at (x, y)."""
    return Box(x, y - 0.2 * size, x + _CHARACTER * size * len(text), y + size)


def _around(x: float, y: float, text: str) -> list[Box]:
    width, height = _CHARACTER * _FONT_SIZE * len(text), 1.2 * _FONT_SIZE
    boxes = []
    for distance in _DISTANCES:
        for right, up in _DIRECTIONS:
            left = x + right * distance - (width if right < 0 else width / 2 if right == 0 else 0)
            bottom = y + up * distance - (height if up < 0 else height / 2 if up == 0 else 0)
            boxes.append(Box(left, bottom, left + width, bottom + height))
    return boxes


def _hit(box: Box, occupied: Sequence[Box]) -> bool:
    return any(box.overlaps(other) for other in occupied)
