"""Which share of its bound each change saved where it was measured: fitted to `benchmarks/results/predictions.json`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """Of a change's bound. middle: the median; low, high: nine of ten measurements lie between.

    beside: share of a request that is won or lost besides.
    """

    low: float
    middle: float
    high: float
    beside: float = 0.05


_UNKNOWN = Share(-0.1, 0.6, 1.0)
_SHARES: dict[tuple[str, str], Share] = {}


def share_of(change: str, device: str) -> Share:
    """The share of `change` on a type of device; a wide one where it was not measured."""
    return _SHARES.get((change, device), _UNKNOWN)
