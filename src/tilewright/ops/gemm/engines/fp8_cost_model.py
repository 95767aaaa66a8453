"""How long a GEMM of e4m3 operands takes with a given tile, in microseconds: waves of tiles, as in `cost_model.py`.

The products of 128 of K are promoted by ordinary code beside the tensor cores, so a tile's rate depends on how much of
that hides: more with two scratch accumulators than with one, less where each thread reads the scales of its columns.

The constants are of an H200 at its power limit (November 2026).  Of five large shapes, K from 512 to 16384, the times
of the chosen tiles are within 2 %; 4096x2112x7168, which leaves power to spare, is 7 % faster.
"""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from tilewright.ops.gemm.engines import cost_model
from tilewright.ops.gemm.engines.cost_model import Prediction, Tile, band
from tilewright.ops.gemm.scaling import Scaling

__all__ = ["Problem", "Tile", "band", "predict", "rank", "scratch"]

FLOPS = {2: 1229e12 / 132, 1: 1156e12 / 132}  # a second, of an SM, by scratch accumulators
FLOPS_BY_TOKEN = {2: 748e12 / 132, 1: 811e12 / 132}  # the same where columns have a scale each
ONE_GROUP = 0.75  # of these, tiles of 64 rows, whose only warpgroup leaves the tensor cores idle: an estimate
ODD = 0.85  # of these, widths between and below: an estimate, of 128x160 at 0.9 to 0.95 and of what a step costs anyway
WIDTHS = (128, 192, 256)  # that were measured
EPILOGUE_US, BYTE_US = 0.3, 0.002  # of a tile; for each byte of its rows of D


class Problem(NamedTuple):
    """`batch` products (M, K) @ (K, N), scaled as `Scaling` says.  out_bytes of an element of D; gated halves D."""

    m: int
    n: int
    k: int
    out_bytes: int = 2
    gated: bool = False
    scaling: int = 2
    batch: int = 1
    sms: int = 132


def scratch(tile: Tile) -> int:
    """Scratch accumulators that registers have room for beside the sums."""
    return 2 if tile.block_m <= 128 and tile.block_n <= 128 else 1


def predict(problem: Problem, tile: Tile) -> Prediction:
    """What `tile` makes of `problem`."""
    p, t = problem, tile
    cluster = t.cluster_m * t.cluster_n
    units = ceil(p.m / (t.block_m * t.cluster_m)) * ceil(p.n / (t.block_n * t.cluster_n)) * p.batch
    waves = ceil(units / max(1, p.sms // cluster))
    steps = ceil(p.k / cost_model.STEP_BYTES)
    k = steps * cost_model.STEP_BYTES
    work = t.block_m * t.block_n * k

    tensor = 2 * work / _rate(t, p.scaling)
    l2 = (t.block_m / t.cluster_n + t.block_n / t.cluster_m) * k / cost_model.L2_BYTES
    epilogue = EPILOGUE_US + BYTE_US * t.block_n * p.out_bytes / (2 if p.gated else 1)

    tiles_us = waves * (1e6 * max(tensor, l2) + epilogue)
    bf16 = cost_model.Problem(p.m, p.n, p.k, 1, p.out_bytes, p.gated, batch=p.batch, sms=p.sms)
    dram_us = 1e6 * cost_model.dram_bytes(bf16, t, waves) / cost_model.DRAM_BYTES
    us = cost_model.START_US + max(tiles_us, dram_us)
    busy = p.m * p.n * p.k * p.batch / (work * waves * p.sms)
    return Prediction(us, units * cluster, waves, busy, 1e6 * tensor, 1e6 * l2, epilogue, dram_us)


def rank(problem: Problem, tiles: Iterable[Tile]) -> list[tuple[Tile, Prediction]]:
    """`tiles` from the fastest to the slowest; of those alike the larger, then the one without a cluster first."""
    predicted = [(tile, predict(problem, tile)) for tile in tiles]
    least = min(prediction.us for _, prediction in predicted)

    def order(pair: tuple[Tile, Prediction]) -> tuple[int, int, int, float]:
        tile, prediction = pair
        alike = int((prediction.us / least - 1) / cost_model.ALIKE)
        return alike, -tile.block_m * tile.block_n, tile.cluster_m * tile.cluster_n, prediction.us

    return sorted(predicted, key=order)


def _rate(t: Tile, scaling: int) -> float:
    """Operations a second.  Scales of columns cost the same in any width: there, 128x144 is as good as 128x192."""
    if scaling == Scaling.TOKEN_TOKEN:
        return FLOPS_BY_TOKEN[scratch(t)] * (ONE_GROUP if t.block_m == 64 else 1.0)
    return FLOPS[scratch(t)] * (ONE_GROUP if t.block_m == 64 else 1.0 if t.block_n in WIDTHS else ODD)
