"""The share of its bound that each change saved where it was measured.

Fitted to the rows of `benchmarks/predictions.json` marked "fit", widened where there are few; the rows marked
"held out" judge them (`tests/assistant/test_predictions.py`). `scripts/prediction_rows.py` measures such rows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """Parts of a change's bound. middle: what is expected; low, high: the range, below 0 where changes lost.

    margin: the part of a request that may be won or lost besides, whatever the bound.
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
    # Eager products of a few rows take other times than those that ceilings are measured with, either way.
    ("bf16", "cpu"): Share(-2.0, -0.2, 0.8),
    ("fp32_on_cpu", "cpu"): Share(-1.6, 0.4, 1.0),
    ("op_replacement", "cpu"): Share(-0.5, 0.1, 1.0, margin=0.08),
    ("merged_qkv", "cpu"): Share(-0.5, 0.0, 1.0, margin=0.1),
    ("merged_gate_up", "cpu"): Share(-0.5, 0.0, 1.0, margin=0.1),
    ("regional_compile", "cpu"): Share(-0.1, 0.1, 0.6),
}


def share_of(change: str, device: str) -> Share:
    """The share of `change` on a type of device; a wide one where it was not measured."""
    return _SHARES.get((change, device), _UNKNOWN)
