"""Predicts the time of a dense product of at most 512 rows with a given tile, K split over a cluster or not, in
microseconds on an H200.

Such a product has few tiles, and the latency of k blocks counts as much as their bytes: shares of K that run beside
each other gain more than the bytes say.  Then come the meeting of the blocks and what they send each other.  A cluster
lies in one GPC, so some multiprocessors stay idle: `few_rows_model.resident` knows how many clusters run at once.

`benchmarks/product_costs.py` measures the times, and `benchmarks/fit_middle.py` prints the factors.  Those of 16-bit
operands are fitted to 282 times without a split (H200, November 2026: 6.8 % mean error on shapes held out, the choice
1 % over the best of four).  `meetings`, `sent` and all factors of e4m3 are estimates, which need the fit.
"""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from tilewright.ops.gemm.kernels.sm90.cost_model import STEP_BYTES, Problem, Tile
from tilewright.ops.gemm.kernels.sm90.few_rows_model import resident

MAX_ROWS = 512
MAX_CLUSTER = 8  # blocks of a portable cluster
_WARP_ROWS = 16


class Terms(NamedTuple):
    """What a tile does for a product, or the microseconds for each of it.  The last `OVERLAPPING` run at the same time:
    they count as the root of `POWER` of the sum of their powers.
    """

    start: float  # 1: a launch behind another
    rounds: float  # tiles that a block takes one after another
    area: float  # 16384 results that a block stores one after another
    pairs: float  # 100 k blocks of blocks that share an operand
    meetings: float  # rounds, if K is split
    sent: float  # MB of accumulators that a block sends
    products: float  # GFLOP of a block, padding included
    steps: float  # 100 k blocks, of 128 bytes, one after another
    reads: float  # MB of operands out of the L2
    memory: float  # MB that the product reads and writes


OVERLAPPING, POWER = 4, 3

US = Terms(
    start=2.59,
    rounds=0.0019,
    area=0.721,
    pairs=2.99,
    meetings=0.8,
    sent=30.0,
    products=152.0,
    steps=7.64,
    reads=0.0568,
    memory=0.249,
)
"""Microseconds for each unit of a term, 16-bit operands."""

US_8_BIT = US._replace(products=100.0, steps=11.0)
"""The same for e4m3 operands with scales."""


def terms(problem: Problem, tile: Tile) -> Terms:
    """Returns the terms of a product with a tile."""
    p, t = problem, tile
    row_tiles, column_tiles = ceil(p.m / t.block_m), ceil(p.n / t.block_n)
    units = ceil(row_tiles / t.cluster_m) * ceil(column_tiles / t.cluster_n) * p.batch
    share = t.cluster_m * t.cluster_n
    rounds = ceil(units / resident(share * t.split, 1, p.sms))
    steps = ceil(ceil(p.k * p.itemsize / STEP_BYTES) / t.split)
    depth = steps * STEP_BYTES // p.itemsize
    sent_rows = min(t.block_m, ceil(p.m / _WARP_ROWS) * _WARP_ROWS)
    reads = (p.m * column_tiles / t.cluster_n + p.n * row_tiles / t.cluster_m) * p.k * p.itemsize
    moved = (p.m + p.n) * p.k * p.itemsize + p.m * p.n * p.out_bytes / (2 if p.gated else 1)
    return Terms(
        start=1.0,
        rounds=rounds,
        area=rounds * t.block_m * t.block_n / 16384 / t.split,
        pairs=rounds * steps / 100 * (share > 1),
        meetings=rounds * (t.split > 1),
        sent=rounds * sent_rows * t.block_n * 4 * (1 - 1 / t.split) / 1e6,
        products=rounds * 2 * t.block_m * t.block_n * depth / 1e9,
        steps=rounds * steps / 100,
        reads=p.batch * reads / 1e6,
        memory=p.batch * moved / 1e6,
    )


def predicted_us(problem: Problem, tile: Tile) -> float:
    """Returns microseconds of a launch behind another."""
    factors = US if problem.itemsize == 2 else US_8_BIT
    us = [factor * amount for factor, amount in zip(factors, terms(problem, tile), strict=True)]
    return sum(us[:-OVERLAPPING]) + sum(each**POWER for each in us[-OVERLAPPING:]) ** (1 / POWER)


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
