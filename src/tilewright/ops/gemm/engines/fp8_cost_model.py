"""How long a GEMM of e4m3 operands takes with a given tile, in microseconds.

As `cost_model.py`, waves of tiles and what bounds a tile, with two differences.  A warpgroup multiplies passes of 64
rows by at most 192 columns and reads both operands again in each, so wider tiles do not relieve shared memory.  And
results of 128 of K are promoted by ordinary code, which takes issue slots beside the tensor cores.
"""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from tilewright.ops.gemm.engines import cost_model
from tilewright.ops.gemm.engines.cost_model import Prediction, Tile, band

__all__ = ["Problem", "Tile", "band", "predict", "rank", "scratch", "shared_pressure"]

TENSOR_FLOPS = 1350e12 / 132  # of an SM, under the power limit
SHARED_PENALTY = 0.4
EXPOSED = {1: 0.2, 2: 0.05}  # of promotion, by scratch accumulators
CLOCK = 1.7e9


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


def shared_pressure(tile: Tile) -> float:
    """Cycles of shared memory for each cycle of the tensor cores, both at their peaks.

    m64nNk32 multiplies for N / 2 cycles, in which it reads 64 rows of A and N of B, 32 bytes each; the copy engine
    writes the tile's rows once.  128 bytes a cycle.
    """
    columns = _pass_columns(tile)
    instructions = tile.block_m // 64 * (tile.block_n // columns)
    read = instructions * (64 + columns) * 32 / 128
    written = (tile.block_m + tile.block_n) * 32 / 128
    return (read + written) / (instructions * columns / 2)


def predict(problem: Problem, tile: Tile) -> Prediction:
    """What `tile` makes of `problem`."""
    p, t = problem, tile
    cluster = t.cluster_m * t.cluster_n
    units = ceil(p.m / (t.block_m * t.cluster_m)) * ceil(p.n / (t.block_n * t.cluster_n)) * p.batch
    waves = ceil(units / max(1, p.sms // cluster))
    steps = ceil(p.k / cost_model.STEP_BYTES)
    k = steps * cost_model.STEP_BYTES
    work = t.block_m * t.block_n * k

    tensor = 2 * work / TENSOR_FLOPS * (1 + SHARED_PENALTY * max(0.0, shared_pressure(t) - 1))
    passes = ceil(t.block_m / 128) * (t.block_n // _pass_columns(t))
    promotion = steps * passes * (_pass_columns(t) / 2 * (2 if p.scaling == 3 else 1) + 60) / CLOCK
    tensor += promotion * (EXPOSED[scratch(t)] if t.block_m > 64 or scratch(t) == 2 else 1.0)
    l2 = (t.block_m / t.cluster_n + t.block_n / t.cluster_m) * k / cost_model.L2_BYTES
    epilogue = cost_model._epilogue_us(t, t.block_n * p.out_bytes // (2 if p.gated else 1)) * max(1, t.block_m // 128)

    tiles_us = waves * (1e6 * max(tensor, l2) + epilogue)
    bf16 = cost_model.Problem(p.m, p.n, p.k, 1, p.out_bytes, p.gated, batch=p.batch, sms=p.sms)
    dram_us = 1e6 * cost_model._dram_bytes(bf16, t, waves) / cost_model.DRAM_BYTES
    us = cost_model.START_US + max(tiles_us, dram_us) + cost_model.SECOND_BOUND * min(tiles_us, dram_us)
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


def _pass_columns(tile: Tile) -> int:
    return tile.block_n if tile.block_n <= 192 else tile.block_n // 2
