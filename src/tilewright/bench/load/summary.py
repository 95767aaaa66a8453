"""What a load says of a server: rates, and percentiles of what its clients waited for."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewright.bench.load.run import Record

_PERCENTILES = (50, 90, 95, 99)
QUANTITIES = {
    "first_token_ms": "to the first token",
    "token_ms": "a token, after the first",
    "gap_ms": "between two events",
    "total_ms": "to the end",
    "waited_ms": "held back by the limit",
}


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """Numbers of one run.

    seconds                 from the first arrival to the last end.
    *_tokens_per_second     tokens of answered requests / seconds, and so `requests_per_second`.
    first_token_ms, ...     mean, percentiles and maximum, over answered requests; None where nothing was seen.
    errors                  number of failed requests by kind, with one message of each.
    """
    answered = [record for record in records if record.failure is None]
    seconds = max(record.sent + record.total for record in records)
    failures = [record.failure for record in records if record.failure is not None]
    examples = dict(failures)
    counts = Counter(kind for kind, _ in failures)
    return {
        "requests": len(records),
        "answered": len(answered),
        "seconds": seconds,
        "requests_per_second": len(answered) / seconds,
        "prompt_tokens_per_second": sum(record.prompt for record in answered) / seconds,
        "output_tokens_per_second": sum(record.output for record in answered) / seconds,
        "errors": {kind: {"count": count, "example": examples[kind]} for kind, count in counts.items()},
        **{name: _spread(each) for name, each in quantities(answered).items()},
    }


def quantities(answered: Sequence[Record]) -> dict[str, list[float]]:
    """Milliseconds of each of `QUANTITIES`, of all answered requests.

    A server may send several tokens in one event, so a token's time is that of the whole answer behind its first event,
    divided by the tokens behind it.
    """
    spoken = [record for record in answered if record.times]
    several = [record for record in spoken if record.output > 1]
    return {
        "first_token_ms": [1e3 * record.times[0] for record in spoken],
        "token_ms": [1e3 * (record.times[-1] - record.times[0]) / (record.output - 1) for record in several],
        "gap_ms": [1e3 * float(gap) for record in spoken for gap in np.diff(record.times)],
        "total_ms": [1e3 * record.total for record in answered],
        "waited_ms": [1e3 * max(record.sent - record.arrival, 0.0) for record in answered],
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    points = dict(zip(_PERCENTILES, np.percentile(values, _PERCENTILES).tolist(), strict=True))
    return {"mean": float(np.mean(values)), **{f"p{p}": v for p, v in points.items()}, "max": max(values)}
