"""Predicts the time of an e4m3 GEMM with a given tile, in microseconds: waves of tiles, as in `cost_model.py`.

A tile takes its WGMMAs, at a rate of its shape that includes promotion, and its epilogue, which nothing hides.  The GPU
is at its power limit, and SMs without a tile in a wave leave their power to the others.

The constants are a least-squares fit to 19 shapes on an H200 (November 2026), timed over warm launches that overlap, so
without launch latency; those of `RATES_BY_TOKEN` are later.  The fastest tile of each shape is within 9 % of the fit:
long K slower, short kernels faster, because of the clock.
"""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from tilewright.ops.gemm.kernels.sm90 import cost_model
from tilewright.ops.gemm.kernels.sm90.cost_model import Prediction, Tile, group_m
from tilewright.ops.gemm.scaled.scaling import Scaling

__all__ = ["Problem", "Tile", "group_m", "predict", "rank"]

RATES = {  # TFLOP/s of full waves, without epilogues
    (192, 128): 1345,
    (128, 192): 1295,
    (256, 128): 1275,
    (128, 256): 1240,
    (128, 128): 1235,
    (192, 96): 1165,
    (128, 96): 1070,
    (128, 64): 860,
    # Not measured: 0.68 of twice the rows, as one warpgroup's products take 376 cycles instead of 256
    (64, 256): 840,
    (64, 128): 840,
    (64, 96): 730,
    (64, 64): 585,
    (64, 32): 400,
}
RATED_SMS = 132  # of the GPU of these rates
BY_TOKEN = 0.72  # factor of these rates if columns have a scale each
# The same with two waves of rows, which share the scales of columns: from ratios to 192x128 on an H100.  Two waves add
# to D slower than three warpgroups, by as much as the scales save
RATES_BY_TOKEN = {(256, 112): 1040, (256, 96): 1010, (256, 128): 980}
IDLE = 0.25  # a wave in which a share f of the SMs has work takes f ** IDLE of a full one's time
EPILOGUE_US, BYTE_US = 0.65, 0.52 / 65536  # of a tile; for each byte of D in it


class Problem(NamedTuple):
    """`batch` products (M, K) @ (K, N), scaled as `Scaling` says.  out_bytes of an element of D; gated halves D; added:
    the epilogue is more than a store of D.
    """

    m: int
    n: int
    k: int
    out_bytes: int = 2
    gated: bool = False
    scaling: int = 2
    batch: int = 1
    sms: int = 132
    added: bool = False


def predict(problem: Problem, tile: Tile) -> Prediction:
    """Predicts the time of `problem` with `tile`."""
    p, t = problem, tile
    tiles = ceil(p.m / t.block_m) * ceil(p.n / t.block_n) * p.batch
    waves = ceil(tiles / p.sms)
    k = ceil(p.k / cost_model.STEP_BYTES) * cost_model.STEP_BYTES
    work = t.block_m * t.block_n * k

    rate = 1e6 * _rate(p, t) / RATED_SMS
    tensor_us = 2 * work / rate * (tiles / (waves * p.sms)) ** IDLE
    l2_us = 1e6 * (t.block_m + t.block_n) * k / cost_model.L2_BYTES
    epilogue_us = EPILOGUE_US + BYTE_US * t.block_m * t.block_n * p.out_bytes / (2 if p.gated else 1)

    moved = cost_model.Problem(p.m, p.n, p.k, 1, p.out_bytes, p.gated, batch=p.batch, sms=p.sms)
    dram_us = 1e6 * cost_model.dram_bytes(moved, t, waves) / cost_model.DRAM_BYTES
    us = max(waves * (max(tensor_us, l2_us) + epilogue_us), dram_us)
    busy = p.m * p.n * p.k * p.batch / (work * waves * p.sms)
    return Prediction(us, tiles, waves, busy, tensor_us, l2_us, epilogue_us, dram_us)


def _rate(problem: Problem, tile: Tile) -> float:
    """Returns TFLOP/s of full waves of `tile`."""
    shape = tile.block_m, tile.block_n
    if problem.scaling != Scaling.TOKEN_TOKEN:
        return RATES[shape]
    two_waves = None if problem.added else RATES_BY_TOKEN.get(shape)
    return two_waves or BY_TOKEN * RATES[shape]


def rank(problem: Problem, tiles: Iterable[Tile]) -> list[tuple[Tile, Prediction]]:
    """Sorts `tiles`, fastest first; of equal predictions the larger tile first."""
    predicted = [(tile, predict(problem, tile)) for tile in tiles]
    return sorted(predicted, key=lambda pair: (pair[1].us, -pair[0].block_m * pair[0].block_n))
