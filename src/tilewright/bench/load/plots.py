"""A picture of a load: what share of requests waited how long at most."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tilewright.bench.load.run import Record
from tilewright.bench.load.summary import QUANTITIES, quantities

_SHOWN = ("first_token_ms", "token_ms", "total_ms")


def plot(records: Sequence[Record], title: str, file: Path) -> None:
    """Write distributions of time to the first token, per token and to the end; the suffix of `file` is the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    figure.suptitle(title)
    values = quantities([record for record in records if record.failure is None])
    for axes, name in zip(figure.subplots(1, len(_SHOWN)), _SHOWN, strict=True):
        ordered = np.sort(values[name])
        axes.step(ordered, 100 * np.arange(1, len(ordered) + 1) / max(len(ordered), 1), where="post")
        axes.set(xlabel=f"ms {QUANTITIES[name]}", ylim=(0, 101), xlim=(0, None))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("% of requests")
    figure.savefig(file)
