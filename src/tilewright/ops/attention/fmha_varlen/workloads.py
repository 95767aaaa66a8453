"""What the bench measures: tokens of a batch, packed.  `params` of a row: T, H, H_kv, D, lengths, and causal.

Names: tokens x H/H_kv x D, how the lengths are spread, and what the mask is.
"""

from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

from tilewright.dispatch import Workload

SHORTEST, LONGEST = 16, 4096
"""Limits of log-uniform lengths, which are typical of documents."""


def uniform(documents: int, tokens: int) -> tuple[int, ...]:
    """Lengths between so many random cuts, always the same."""
    cuts = sorted(Random(documents).sample(range(1, tokens), documents - 1))
    return tuple(b - a for a, b in pairwise((0, *cuts, tokens)))


def by_octaves(tokens: int) -> tuple[int, ...]:
    """Log-uniform lengths until the tokens are used up, always the same; the last one is cut."""
    draw = Random(tokens)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, round(SHORTEST * (LONGEST / SHORTEST) ** draw.random())))
    return tuple(lengths)


def _row(lengths: Sequence[int], spread: str, causal: bool = True, **more: Any) -> Workload:
    sizes = {"H": 32, "H_kv": 8, "D": 128, "lengths": tuple(lengths), **more}
    name = f"{sum(lengths)}x{sizes['H']}/{sizes['H_kv']}x{sizes['D']}_{spread}_{'causal' if causal else 'full'}"
    return Workload(name, {**sizes, **({"causal": True} if causal else {})})


WORKLOADS = (
    _row(uniform(64, 32768), "64random"),
    _row((2048,) * 16, "16x2048"),
    _row((2048,) * 16, "16x2048", causal=False),
    _row(by_octaves(8192), "octaves"),
)
CPU_WORKLOADS = (
    Workload("256x4/2x64_5random_causal", {"H": 4, "H_kv": 2, "D": 64, "lengths": uniform(5, 256), "causal": True}),
)
