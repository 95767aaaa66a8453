"""A seeded sample of edge sizes for every op: combinations in which kernels fail and which no written list covers.

A problem is an edge case of the contract with other sizes: 0, 1, 2, and one below, at and above a tile; head dims from
16 to 256; groups of heads; tensors that begin 0, 2, 4 or 8 bytes after a boundary.  There are millions of combinations,
and most faults need two values at once.  So each problem is the one of several random candidates with the most pairs of
values that no earlier problem has: the first problems cover the most.  The same seed gives the same problems in every
process.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from tilewright.dispatch import Contract

TILES = (16, 32, 64, 128, 256)
EDGES = (0, 1, 2, *(size for tile in TILES for size in (tile - 1, tile, tile + 1)))
WIDTHS = tuple(range(16, 257, 8))
OFFSETS = (0, 2, 4, 8)  # bytes
CANDIDATES = 12

Values = Sequence[Any] | Callable[[Mapping[str, Any]], Sequence[Any]]

SIZES: Mapping[str, Values] = {
    **dict.fromkeys(("M", "N", "K", "S", "S_q", "S_k", "T"), EDGES),
    "B": (0, 1, 2, 3),
    "G": (1, 2, 3, 5),
    "H": (1, 2, 3, 4, 6, 8),
    "H_kv": lambda params: [n for n in range(1, params["H"] + 1) if params["H"] % n == 0],
    **dict.fromkeys(("D", "D_v"), WIDTHS),
    "D_pe": (8, 16, 24, 32, 64),
    "R": lambda params: [2, params["D"] // 4 * 2, params["D"]],
    "positions": lambda params: [max(params.get("S", 1), params.get("T", 1), 1) + 13],
}
"""Values of the sizes whose names contracts share.  `edge_grid` of a contract gives others."""


@dataclass(frozen=True)
class EdgeProblem:
    """One call.   base: name of the edge case whose options it has.   offset: bytes from a boundary of 256 to the
    start of every tensor.   seed: seed of its random numbers.
    """

    op: str
    base: str
    params: Mapping[str, Any]
    dtype: torch.dtype
    offset: int
    seed: int

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={_word(value)}" for name, value in self.params.items())
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.op} ({self.base.partition(':')[0]}) {sizes} {dtype} +{self.offset} bytes"


def problems(contract: Contract, seed: int, density: float = 1.5) -> list[EdgeProblem]:
    """The problems of one op, at least two: `density` for each parameter that varies.

    A smaller density gives the first problems of a larger one.
    """
    draw = random.Random(f"{seed} {contract.name}")
    varied = {name for base in contract.edge_cases for name in base.params if name in SIZES}
    count = max(2, math.ceil(density * (len(varied | {*contract.edge_grid}) + math.sqrt(len(contract.edge_cases)) + 2)))
    covered: set[tuple[str, str]] = set()
    chosen: list[EdgeProblem] = []
    while len(chosen) < count:
        candidates = [_candidate(contract, draw, seed + len(chosen)) for _ in range(CANDIDATES)]
        pairs = [_pairs(candidate) for candidate in candidates]
        best = max(range(CANDIDATES), key=lambda i: len(pairs[i] - covered))
        covered |= pairs[best]
        chosen.append(candidates[best])
    return chosen


def _candidate(contract: Contract, draw: random.Random, seed: int) -> EdgeProblem:
    base = draw.choice(contract.edge_cases)
    params = dict(base.params)
    for name in (*base.params, *(name for name in contract.edge_grid if name not in base.params)):
        values = contract.edge_grid.get(name, SIZES.get(name))
        if values is None:
            continue
        allowed = [*values(params)] if callable(values) else [*values]
        if not callable(values) and name in base.params:
            allowed.append(base.params[name])
        value = draw.choice(allowed)
        if value is None:
            params.pop(name, None)
        else:
            params[name] = value
    return EdgeProblem(contract.name, base.name, params, draw.choice(contract.dtypes), draw.choice(OFFSETS), seed)


def _pairs(problem: EdgeProblem) -> set[tuple[str, str]]:
    """All pairs of the values of a problem."""
    parts = {"base": problem.base, "dtype": str(problem.dtype), "offset": problem.offset, **problem.params}
    return set(combinations(sorted(f"{name}={_word(value)}" for name, value in parts.items()), 2))


def _word(value: Any) -> str:
    """Text of a value that is the same in every process, for functions too."""
    return str(getattr(value, "__name__", value)).removeprefix("torch.").replace(" ", "")
