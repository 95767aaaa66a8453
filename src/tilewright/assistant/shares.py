"""The share of its bound that each change saved where it was measured.

The shares are fitted to the rows of `benchmarks/predictions.json` marked "fit", and widened where there are few such
rows; the rows marked "held out" test them (`tests/assistant/test_predictions.py`). `scripts/prediction_rows.py`
measures rows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """Parts of a change's bound. middle: the expected one; low, high: the range, below 0 where changes were slower.

    margin: part of a request's time that may be saved or lost in addition, whatever the bound.
    """

    low: float
    middle: float
    high: float
    margin: float = 0.05


_UNKNOWN = Share(-0.1, 0.6, 1.0)
_SHARES: dict[tuple[str, str], Share] = {
    ("static_decode", "cuda"): Share(0.7, 1.0, 1.1),
    ("static_decode", "cpu"): Share(0.3, 0.8, 1.1, margin=0.1),
    ("compiled_decode", "cpu"): Share(0.5, 0.85, 1.05),
    # Eager products of a few rows may be faster or slower than those that the ceilings are measured with
    ("bf16", "cpu"): Share(-2.0, -0.2, 0.8),
    ("fp32_on_cpu", "cpu"): Share(-1.6, 0.4, 1.0),
    ("op_replacement", "cpu"): Share(-0.5, 0.1, 1.0, margin=0.08),
    ("merged_qkv", "cpu"): Share(-0.5, 0.0, 1.0, margin=0.1),
    ("merged_gate_up", "cpu"): Share(-0.5, 0.0, 1.0, margin=0.1),
    ("regional_compile", "cpu"): Share(-0.1, 0.1, 0.6),
}


def share_of(change: str, device: str) -> Share:
    """The share of `change` on a type of device; a wide range if it was not measured there."""
    return _SHARES.get((change, device), _UNKNOWN)
