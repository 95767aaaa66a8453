"""How long a dense GEMM takes with a given tile, in microseconds: waves of tiles, and what bounds a tile.

Blocks that stay on the machine walk over the tiles, one on each SM at a time, so the kernel takes as long as the SM
with most tiles: `waves` tiles.  A tile takes its multiplications or its loads from L2, whichever is slower, and the
part of its epilogue that no other warpgroup's multiplications hide; the whole never less than its traffic with DRAM.

The constants are of an H200 (November 2026).  They rank tiles; a time within 10 % is luck, a better tile the purpose.
"""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

STEP_BYTES = 128  # of K in one stage
CHUNK_BYTES = 128  # of a row of D that a warpgroup stages at once
TENSOR_FLOPS = 660e12 / 132  # of an SM, 16-bit, under the power limit: squares of 4096 and 8192 reach 705 to 750
SHARED_PENALTY = 0.4  # 128x128 tiles are 10 % slower than 128x256: see `shared_pressure`
L2_BYTES = 16e12 / 132  # a second, into the shared memory of one SM: 64x64 tiles of 512x576x7168 take 1.8 MB in 14 us
DRAM_BYTES = 4.2e12  # a second, of the whole machine
L2_HELD = 36e6  # bytes of operands that stay in an L2 of 60 MB while results stream through it
START_US = 3.0  # launch, and the way of the first stage from DRAM
EPILOGUE_US, CHUNK_US, STRIP_US = 0.2, 0.1, 0.02  # once a tile; for each 64 rows x 128 bytes of D; for each store
EXPOSED = 0.5  # of the epilogue, where two warpgroups take turns
ALIKE = 0.015  # predictions that differ by less are one
SECOND_BOUND = 0.1  # of the slower bound's rival: the two do not overlap perfectly


class Tile(NamedTuple):
    """block_m x block_n of D a block; cluster_m blocks share a tile of B, or cluster_n one of A."""

    block_m: int
    block_n: int
    cluster_m: int = 1
    cluster_n: int = 1


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
    """us: in all.  tiles: of D.  busy: share of the SMs' time in `waves` waves that is work; edges of tiles are not.

    tensor_us, l2_us, epilogue_us: of one tile.  dram_us: of the whole.
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
    """What `tile` makes of `problem`."""
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
    """Cycles of shared memory for each cycle of the tensor cores, both at their peaks.

    m64nNk16 multiplies for N / 2 cycles, in which it reads 64 rows of A and N of B, 32 bytes each; the copy engine
    writes the tile's rows once.  128 bytes a cycle.
    """
    instructions = tile.block_m / 64
    read = instructions * (64 + tile.block_n) * 32 / 128
    written = (tile.block_m + tile.block_n) * 32 / 128
    return (read + written) / (instructions * tile.block_n / 2)


def band(tile: Tile, sms: int) -> int:
    """Rows of units (tiles, or pairs along M) that are walked together: those SMs read the fewest bytes if the tiles of
    a wave cover about a square of D.
    """
    square = (sms * tile.block_n / tile.block_m) ** 0.5 / tile.cluster_m
    return min((4, 8, 16), key=lambda height: abs(height - square))


def rank(problem: Problem, tiles: Iterable[Tile]) -> list[tuple[Tile, Prediction]]:
    """`tiles` from the fastest to the slowest; of those alike the larger, then the one without a cluster first."""
    predicted = [(tile, predict(problem, tile)) for tile in tiles]
    least = min(prediction.us for _, prediction in predicted)

    def order(pair: tuple[Tile, Prediction]) -> tuple[int, int, int, float]:
        tile, prediction = pair
        alike = int((prediction.us / least - 1) / ALIKE)
        return alike, -tile.block_m * tile.block_n, tile.cluster_m * tile.cluster_n, prediction.us

    return sorted(predicted, key=order)


def strip_bytes(row_bytes: int) -> int:
    """Bytes of a row of D that one store takes: the widest swizzle that divides a tile's row."""
    return next(width for width in (128, 64, 32) if row_bytes % width == 0)


def _epilogue_us(t: Tile, row_bytes: int) -> float:
    """Of a warpgroup: its 64 rows of D leave in chunks of 128 bytes, and these in strips."""
    leave = CHUNK_US * ceil(row_bytes / CHUNK_BYTES) + STRIP_US * row_bytes / strip_bytes(row_bytes)
    return (EPILOGUE_US + leave) * (1.0 if t.block_m == 64 else EXPOSED)


def dram_bytes(p: Problem, t: Tile, waves: int) -> float:
    """Operands once if they stay in L2, else what each wave touches; the result once."""
    operands = (p.m + p.n) * p.k * p.itemsize
    if operands > L2_HELD:
        height = band(t, p.sms) * t.cluster_m
        touched = min(p.m, height * t.block_m) + min(p.n, ceil(p.sms / height) * t.block_n)
        operands = max(operands, min(waves * touched * p.k * p.itemsize, 4 * operands))
    return p.batch * (operands + p.m * p.n * p.out_bytes / (2 if p.gated else 1))
