"""Predicts the time of a dense GEMM with a given tile, in microseconds, from waves of tiles and the bound of a tile.

The kernel is persistent, with one tile on each SM at a time, so it takes as long as the SM with most tiles: `waves`
tiles.  A tile takes the longer of its WGMMAs and its loads from L2, and the part of its epilogue that the WGMMAs of
other warpgroups do not hide; the whole takes at least its DRAM traffic.

The constants are of an H200 (November 2026).  They serve to rank tiles, not to predict times to 10 %.
"""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

STEP_BYTES = 128  # of K in a stage
CHUNK_BYTES = 128  # of a row of D that a warpgroup stages at once
TENSOR_FLOPS = 660e12 / 132  # of an SM, 16-bit, under the power limit; squares of 4096 and 8192 reach 705 to 750
SHARED_PENALTY = 0.4  # 128x128 tiles are 10 % slower than 128x256: see `shared_pressure`
L2_BYTES = 16e12 / 132  # a second, into the shared memory of one SM: 64x64 tiles of 512x576x7168 take 1.8 MB in 14 us
DRAM_BYTES = 4.2e12  # a second, of the whole machine
L2_HELD = 36e6  # bytes of operands that stay in an L2 of 60 MB while results stream through
START_US = 3.0  # launch, and latency of the first stage from DRAM
EPILOGUE_US, CHUNK_US, STRIP_US = 0.2, 0.1, 0.02  # once a tile; for each 64 rows x 128 bytes of D; for each store
EXPOSED = 0.5  # share of the epilogue that is exposed if two warpgroups take turns
ALIKE = 0.015  # predictions that differ by less count as equal
SECOND_BOUND = 0.1  # of the smaller of two bounds, which do not overlap perfectly


class Tile(NamedTuple):
    """block_m x block_n of D for a block; cluster_m blocks share a tile of B, or cluster_n blocks one of A; split:
    parts of K, each with blocks of its own (`middle_cost.py` predicts those times).
    """

    block_m: int
    block_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    split: int = 1


class Problem(NamedTuple):
    """`batch` products (M, K) @ (K, N).  itemsize of A and B, out_bytes of an element of D; gated halves D's columns.

    mn_major_b: B is contiguous along N and comes in boxes of 64 columns.  sms: multiprocessors of the GPU.
    """

    m: int
    n: int
    k: int
    itemsize: int = 2
    out_bytes: int = 2
    gated: bool = False
    mn_major_b: bool = False
    batch: int = 1
    sms: int = 132


class Prediction(NamedTuple):
    """us: total.  tiles: of D.  busy: useful share of the SMs' time in `waves` waves, without padding of edge tiles.

    tensor_us, l2_us, epilogue_us: for one tile.  dram_us: for the whole kernel.
    """

    us: float
    tiles: int
    waves: int
    busy: float
    tensor_us: float
    l2_us: float
    epilogue_us: float
    dram_us: float

    def __str__(self) -> str:
        return (
            f"{self.us:.1f} us predicted: {self.tiles} tiles in {self.waves} waves ({self.busy:.0%} busy), each "
            f"{self.tensor_us:.1f} us of tensor cores, {self.l2_us:.1f} of L2, {self.epilogue_us:.1f} of epilogue; "
            f"DRAM {self.dram_us:.1f} us"
        )


def predict(problem: Problem, tile: Tile) -> Prediction:
    """Predicts the time of `problem` with `tile`."""
    p, t = problem, tile
    cluster = t.cluster_m * t.cluster_n
    units = ceil(p.m / (t.block_m * t.cluster_m)) * ceil(p.n / (t.block_n * t.cluster_n)) * p.batch
    waves = ceil(units / max(1, p.sms // cluster))
    k = ceil(p.k * p.itemsize / STEP_BYTES) * STEP_BYTES // p.itemsize
    work = t.block_m * t.block_n * k

    rate = TENSOR_FLOPS * 2 / p.itemsize
    tensor = 2 * work / rate * (1 + SHARED_PENALTY * max(0.0, shared_pressure(t) - 1))
    columns = ceil(t.block_n / 64) * 64 if p.mn_major_b else t.block_n
    l2 = (t.block_m / t.cluster_n + columns / t.cluster_m) * k * p.itemsize / L2_BYTES
    epilogue = _epilogue_us(t, t.block_n * p.out_bytes // (2 if p.gated else 1))

    tiles_us = waves * (1e6 * max(tensor, l2) + epilogue)
    dram_us = 1e6 * dram_bytes(p, t, waves) / DRAM_BYTES
    us = START_US + max(tiles_us, dram_us) + SECOND_BOUND * min(tiles_us, dram_us)
    busy = p.m * p.n * p.k * p.batch / (work * waves * p.sms)
    return Prediction(us, units * cluster, waves, busy, 1e6 * tensor, 1e6 * l2, epilogue, dram_us)


def shared_pressure(tile: Tile) -> float:
    """Returns the cycles of shared memory for each cycle of the tensor cores, both at their peaks.

    m64nNk16 takes N / 2 cycles and reads 64 rows of A and N of B, 32 bytes each; TMA writes the tile's rows once.
    Shared memory transfers 128 bytes a cycle.
    """
    instructions = tile.block_m / 64
    read = instructions * (64 + tile.block_n) * 32 / 128
    written = (tile.block_m + tile.block_n) * 32 / 128
    return (read + written) / (instructions * tile.block_n / 2)


def group_m(tile: Tile, sms: int) -> int:
    """Returns the rows of units (tiles, or pairs along M) in a group of the tile order.  SMs read the fewest bytes from
    DRAM if the tiles of a wave cover about a square of D.
    """
    square = (sms * tile.block_n / tile.block_m) ** 0.5 / tile.cluster_m
    return min((4, 8, 16), key=lambda height: abs(height - square))


def rank(problem: Problem, tiles: Iterable[Tile]) -> list[tuple[Tile, Prediction]]:
    """Sorts `tiles`, fastest first; of equal predictions the larger tile first, then the one without a cluster."""
    predicted = [(tile, predict(problem, tile)) for tile in tiles]
    least = min(prediction.us for _, prediction in predicted)

    def order(pair: tuple[Tile, Prediction]) -> tuple[int, int, int, float]:
        tile, prediction = pair
        alike = int((prediction.us / least - 1) / ALIKE)
        return alike, -tile.block_m * tile.block_n, tile.cluster_m * tile.cluster_n, prediction.us

    return sorted(predicted, key=order)


def strip_bytes(row_bytes: int) -> int:
    """Returns the bytes of a row of D that one store takes: the widest swizzle that divides a tile's row."""
    return next(width for width in (128, 64, 32) if row_bytes % width == 0)


def _epilogue_us(t: Tile, row_bytes: int) -> float:
    """Time of a warpgroup's epilogue: it stores 64 rows of D in chunks of 128 bytes, and these in strips."""
    store_us = CHUNK_US * ceil(row_bytes / CHUNK_BYTES) + STRIP_US * row_bytes / strip_bytes(row_bytes)
    return (EPILOGUE_US + store_us) * (1.0 if t.block_m == 64 else EXPOSED)


def dram_bytes(p: Problem, t: Tile, waves: int) -> float:
    """Returns the DRAM traffic: operands once if they stay in L2, else once a wave; the result once."""
    operands = (p.m + p.n) * p.k * p.itemsize
    if operands > L2_HELD:
        height = group_m(t, p.sms) * t.cluster_m
        touched = min(p.m, height * t.block_m) + min(p.n, ceil(p.sms / height) * t.block_n)
        operands = max(operands, min(waves * touched * p.k * p.itemsize, 4 * operands))
    return p.batch * (operands + p.m * p.n * p.out_bytes / (2 if p.gated else 1))
