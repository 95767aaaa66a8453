"""Predicts the time of a dense product of at most 512 rows with a given tile, K split over a cluster or not, in
microseconds on an H200.

Such a product has few tiles.  A block's time is the latency of its k blocks, in part hidden by their bytes and
products, so that shares of K that run beside each other gain more than the bytes say; then come the meeting of the
blocks and what they send each other.  A cluster lies in one GPC, so some multiprocessors stay idle:
`few_rows_model.resident` knows how many clusters run at once.

`benchmarks/product_costs.py` measures the times, and `benchmarks/fit_middle.py` prints the factors.  Those of 16-bit
operands are fitted to 512 times without a split (November 2026: 10 % mean error, the choice 2.6 % over the best of
four); `meetings` and `sent` are estimates, and so are the factors of e4m3: they need the fit.
"""

from collections.abc import Iterable
from math import ceil, hypot
from typing import NamedTuple

from tilewright.ops.gemm.kernels.sm90.cost_model import STEP_BYTES, Problem, Tile
from tilewright.ops.gemm.kernels.sm90.few_rows_model import resident

MAX_ROWS = 512
WARP_ROWS = 16
MAX_CLUSTER = 8  # blocks of a portable cluster


class Terms(NamedTuple):
    """What a tile does for a product, or the microseconds for each of it.  The last three overlap: they count as the
    root of their sum of squares.
    """

    start: float  # 1: a launch behind another
    rounds: float  # tiles that a block takes one after another
    area: float  # 16384 results that a block computes one after another
    steps: float  # 100 k blocks, of 128 bytes, one after another
    meetings: float  # rounds, if K is split
    sent: float  # MB of accumulators that a block sends
    products: float  # GFLOP of a block, padding included
    intake: float  # MB that a block reads
    memory: float  # MB that the product reads and writes


US = Terms(
    start=1.84,
    rounds=0.63,
    area=0.605,
    steps=6.32,
    meetings=0.8,
    sent=30.0,
    products=136.0,
    intake=1.19,
    memory=0.204,
)
"""Microseconds for each unit of a term, 16-bit operands."""

US_8_BIT = US._replace(products=85.0, steps=9.0)
"""The same for e4m3 operands with scales."""


def terms(problem: Problem, tile: Tile) -> Terms:
    """Returns the terms of a product with a tile."""
    p, t = problem, tile
    units = ceil(p.m / (t.block_m * t.cluster_m)) * ceil(p.n / (t.block_n * t.cluster_n)) * p.batch
    rounds = ceil(units / resident(t.cluster_m * t.cluster_n * t.split, 1, p.sms))
    steps = ceil(ceil(p.k * p.itemsize / STEP_BYTES) / t.split)
    rows = min(t.block_m, p.m)
    sent_rows = min(t.block_m, ceil(p.m / WARP_ROWS) * WARP_ROWS)
    depth = steps * STEP_BYTES // p.itemsize
    moved = (p.m + p.n) * p.k * p.itemsize + p.m * p.n * p.out_bytes / (2 if p.gated else 1)
    return Terms(
        start=1.0,
        rounds=rounds,
        area=rounds * t.block_m * t.block_n / 16384 / t.split,
        steps=rounds * steps / 100,
        meetings=rounds * (t.split > 1),
        sent=rounds * sent_rows * t.block_n * 4 * (1 - 1 / t.split) / 1e6,
        products=rounds * 2 * t.block_m * t.block_n * depth / 1e9,
        intake=rounds * (rows + t.block_n) * steps * STEP_BYTES / 1e6,
        memory=p.batch * moved / 1e6,
    )


def predicted_us(problem: Problem, tile: Tile) -> float:
    """Returns microseconds of a launch behind another."""
    factors = US if problem.itemsize == 2 else US_8_BIT
    us = [factor * amount for factor, amount in zip(factors, terms(problem, tile), strict=True)]
    return sum(us[:-3]) + hypot(*us[-3:])


def rank(problem: Problem, tiles: Iterable[Tile]) -> list[Tile]:
    """Sorts `tiles`, the least predicted time first."""
    return sorted(tiles, key=lambda tile: predicted_us(problem, tile))


def splits(blocks: dict[int, tuple[int, ...]], shares: Iterable[tuple[int, int]]) -> tuple[Tile, ...]:
    """Returns the tiles whose K is split, for each width of `blocks` by rows, and each pair (cluster_m, cluster_n)."""
    return tuple(
        Tile(rows, columns, *share, split)
        for rows, widths in blocks.items()
        for columns in widths
        for share in shares
        for split in range(2, MAX_CLUSTER // (share[0] * share[1]) + 1)
    )


def fits(problem: Problem, tile: Tile) -> bool:
    """Returns whether every block of a cluster has some of K, and every block that shares a tile of its own."""
    return (
        tile.split <= max(1, ceil(problem.k * problem.itemsize / STEP_BYTES))
        and (tile.cluster_m == 1 or problem.m > tile.block_m)
        and (tile.cluster_n == 1 or problem.n > tile.block_n)
    )
