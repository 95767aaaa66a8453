"""Predicts the time of a dense product of at most 512 rows with a given tile, K split over a cluster or not, in
microseconds on an H200.

Such a product has few tiles, and the latency of k blocks counts as much as their bytes: shares of K that run beside
each other gain more than the bytes say.  Then come the meeting of the blocks and what they send each other, which costs
most: 0.11 us for each KB of a block.  A cluster lies in one GPC, so some multiprocessors stay idle:
`few_rows_model.resident` knows how many clusters run at once.

`benchmarks/product_costs.py` measures the times, and `benchmarks/fit_middle.py` prints the factors: fitted to 1450
times of 16-bit operands and 1067 of e4m3 (H200, November 2026).  On shapes held out the mean error is 6.8 % and 5.2 %,
and the choice takes 1.6 % and 0.6 % longer than the best of some 15 tiles that were timed.
"""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from tilewright.ops.gemm.kernels.sm90.cost_model import STEP_BYTES, Problem, Tile
from tilewright.ops.gemm.kernels.sm90.few_rows_model import resident

MAX_ROWS = 512
MAX_CLUSTER = 8  # blocks of a portable cluster
MARGIN = 0.1
"""What a cluster must promise to save: predictions are 6 % off, and a wrong cluster loses more than a right one gains.
Without the margin the choice of 16-bit operands takes 3 % longer."""
_WARP_ROWS = 16


class Terms(NamedTuple):
    """What a tile does for a product, or the microseconds for each of it.  The last `OVERLAPPING` run at the same time:
    they count as the root of `POWER` of the sum of their powers.
    """

    start: float  # 1: a launch behind another
    rounds: float  # tiles that a block takes one after another
    area: float  # 16384 results that a block stores one after another
    pairs: float  # 100 k blocks of blocks that share an operand
    unfilled: float  # the same, if their tiles reach beyond the rows of A
    narrow: float  # 100 k blocks of one math warpgroup: 64 rows
    narrow_split: float  # the same, if K is split
    meetings: float  # rounds, if K is split
    sent: float  # MB of accumulators that a block sends
    products: float  # GFLOP of a block, padding included
    steps: float  # 100 k blocks, of 128 bytes, one after another
    reads: float  # MB of operands out of the L2
    memory: float  # MB that the product reads and writes


OVERLAPPING, POWER = 4, 2

US = Terms(
    start=1.65,
    rounds=0.465,
    area=0.000382,
    pairs=2.36,
    unfilled=2.89,
    narrow=0.74,
    narrow_split=3.92,
    meetings=0.00268,
    sent=115.0,
    products=142.0,
    steps=6.79,
    reads=0.0456,
    memory=0.195,
)
"""Microseconds for each unit of a term, 16-bit operands."""

US_8_BIT = Terms(
    start=1.62,
    rounds=0.000435,
    area=0.789,
    pairs=4.54,
    unfilled=0.000922,
    narrow=1.65,
    narrow_split=1.11,
    meetings=1.19,
    sent=107.0,
    products=88.8,
    steps=12.1,
    reads=0.0546,
    memory=0.139,
)
"""The same for e4m3 operands with scales."""


def terms(problem: Problem, tile: Tile) -> Terms:
    """Returns the terms of a product with a tile."""
    p, t = problem, tile
    row_tiles, column_tiles = ceil(p.m / t.block_m), ceil(p.n / t.block_n)
    units = ceil(row_tiles / t.cluster_m) * ceil(column_tiles / t.cluster_n) * p.batch
    share = t.cluster_m * t.cluster_n
    rounds = ceil(units / resident(share * t.split, 1, p.sms))
    steps = ceil(ceil(p.k * p.itemsize / STEP_BYTES) / t.split)
    blocks, narrow = rounds * steps / 100, t.block_m == 64
    depth = steps * STEP_BYTES // p.itemsize
    sent_rows = min(t.block_m, ceil(p.m / _WARP_ROWS) * _WARP_ROWS)
    reads = (p.m * column_tiles / t.cluster_n + p.n * row_tiles / t.cluster_m) * p.k * p.itemsize
    moved = (p.m + p.n) * p.k * p.itemsize + p.m * p.n * p.out_bytes / (2 if p.gated else 1)
    return Terms(
        start=1.0,
        rounds=rounds,
        area=rounds * t.block_m * t.block_n / 16384 / t.split,
        pairs=blocks * (share > 1),
        unfilled=blocks * (share > 1 and p.m % (t.block_m * t.cluster_m) > 0),
        narrow=blocks * narrow,
        narrow_split=blocks * (narrow and t.split > 1),
        meetings=rounds * (t.split > 1),
        sent=rounds * sent_rows * t.block_n * 4 * (1 - 1 / t.split) / 1e6,
        products=rounds * 2 * t.block_m * t.block_n * depth / 1e9,
        steps=blocks,
        reads=p.batch * reads / 1e6,
        memory=p.batch * moved / 1e6,
    )


def predicted_us(problem: Problem, tile: Tile) -> float:
    """Returns microseconds of a launch behind another."""
    factors = US if problem.itemsize == 2 else US_8_BIT
    us = [factor * amount for factor, amount in zip(factors, terms(problem, tile), strict=True)]
    return sum(us[:-OVERLAPPING]) + sum(each**POWER for each in us[-OVERLAPPING:]) ** (1 / POWER)


def preference(us: float, tile: Tile) -> float:
    """Returns the predicted microseconds with the margin: the tile of the least is chosen."""
    return us * (1 + MARGIN * (tile.cluster_m * tile.cluster_n * tile.split > 1))


def rank(problem: Problem, tiles: Iterable[Tile]) -> list[Tile]:
    """Sorts `tiles`, the most preferred first."""
    return sorted(tiles, key=lambda tile: preference(predicted_us(problem, tile), tile))


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
