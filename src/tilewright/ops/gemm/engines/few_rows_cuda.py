"""Few rows of A, at most 64, against weights that are read once: CUDA C++ for Hopper.

Traffic: N * K * 2 bytes of weights; all else is small.  Floor: 7.6 us for 4096 x 4096 at 4.4 TB/s.  The matrix units
idle; what counts is that every multiprocessor keeps 64 KB or more on their way, from the first microsecond to the last.
Hence tiles of 64 weight rows, K split over the blocks of a cluster where there are too few of them, rings that run on
from tile to tile, and a start that overlaps the end of the kernel before (programmatic dependent launch: a launch in a
chain costs 2.2 to 2.7 us beside the reading, without it 3.3).  Rows of A ("tokens") come from the L2 again for every
tile: tokens / 64 bytes for each byte of weights, so that 64 of them double what the L2 delivers.

Measured on an H200, 2026-11: 4096 x 4096 at M = 8 takes 9.4 us, cuBLAS 12.6.  Over 11 shapes, tiles of 128 or 256
weight rows and stages of 64 of K gain 0.2 % (geometric mean), clusters that end after one tile nothing: all are gone.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.collect import collecting
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tensor_map import tensor_map
from tilewright.ops.gemm.engines import sm90_operands
from tilewright.ops.gemm.operands import ACTIVATIONS, Major, major_a, major_b

MAX_ROWS = 64
_BLOCK_N, _BLOCK_K, _THREADS = 64, 128, 160  # as in the header: weight rows of a tile, K of a stage, threads of a block
_CHUNK, _SPAN = 64, 128  # elements and bytes of a box's row
_PITCH, _PARCEL = 68, 2048  # floats of a row of the result, bytes of 64 x 8 sums
_WIDTH = 4  # results that a thread stores at once


class Config(NamedTuple):
    """tokens: rows of A in a tile.  stages: of the ring.  split: blocks of a cluster that share K.  ctas: blocks that
    fit a multiprocessor.
    """

    tokens: int
    stages: int
    split: int
    ctas: int


class Params(NamedTuple):
    """What few_rows_gemm is compiled for."""

    kTokens: int
    kStages: int
    kSplit: int
    kCtas: int
    kMnMajor: bool
    kActivation: int
    Element: torch.dtype
    Out: torch.dtype
    Bias: torch.dtype
    Addend: torch.dtype


KERNEL = CudaKernel(
    Path(__file__).with_name("sm90_few_rows_gemm.cuh"),
    "few_rows_gemm",
    "TTPPPPqqqqfiiiii?",
    archs=("sm_90a",),
    dependent=True,
)


def refusal(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    scale: Tensor | None,
    alpha: float,
    activation: str,
    out_dtype: torch.dtype,
) -> str | None:
    """Why this engine cannot run these arguments; None if it can."""
    if a.shape[-2] > MAX_ROWS:
        return f"is for at most {MAX_ROWS} rows of a, got {a.shape[-2]}"
    if major_a(a) is not Major.K or major_b(b) is None:
        return "needs a contiguous along K, and b along K or N"
    return sm90_operands.refusal(a, b, bias, c, activation, out_dtype)


def gemm(
    d: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    scale: Tensor | None,
    alpha: float,
    activation: str,
    config: Config,
) -> None:
    """d = act(alpha * scale * a @ b + bias) + c.  See `engines/__init__.py`; any number of rows is computed right."""
    batches, rows, depth = a.shape
    columns = b.shape[-1]
    if config.split > _steps(depth):
        raise InputError(
            f"few_rows_cuda: split={config.split} leaves blocks without work, K={depth} has {_steps(depth)} steps of "
            f"{_BLOCK_K}; take a split of at most that, as `candidates` does"
        )
    along_n = major_b(b) is Major.MN
    token_rows = min(rows, config.tokens)  # rows that do not exist are not read: their sums are never stored
    params = Params(
        kTokens=config.tokens,
        kStages=config.stages,
        kSplit=config.split,
        kCtas=config.ctas,
        kMnMajor=along_n,
        kActivation=ACTIVATIONS.index(activation),
        Element=a.dtype,
        Out=d.dtype,
        Bias=a.dtype if bias is None else bias.dtype,
        Addend=d.dtype if c is None else c.dtype,
    )
    args = (
        tensor_map(b if along_n else b.mT, (1, _BLOCK_N, _CHUNK), swizzle=_SPAN),
        tensor_map(a, (1, token_rows, _CHUNK), swizzle=_SPAN),
        d,
        0 if bias is None else bias,
        0 if c is None else c,
        0 if scale is None else scale,
        *d.stride()[:2],
        *((0, 0) if c is None else c.stride()[:2]),
        float(alpha),
        rows,
        columns,
        depth,
        batches,
        token_rows,
        collecting() is None and _stores_vectors(d),
    )
    clusters = min(batches * _tiles(config, rows, columns), _resident(config.split, config.ctas, usable_sms(d.device)))
    KERNEL(
        (clusters * config.split,),
        args,
        params,
        block=_THREADS,
        shared_bytes=shared_bytes(config),
        cluster=(config.split, 1, 1) if config.split > 1 else None,
    )


def _stores_vectors(d: Tensor) -> bool:
    """May four neighbouring results (two of "swiglu") be stored at once, wherever a row of d begins?"""
    vector = _WIDTH * d.itemsize
    return d.data_ptr() % vector == 0 and all(stride * d.itemsize % vector == 0 for stride in d.stride()[:2])


# ------------------------------------------------------------------------------------------ shared memory, clusters

_SHARED = {1: 232448, 2: 115712, 3: 76800}
"""Bytes a block may have so that 1, 2, 3 fit into the 228 KB of a multiprocessor, 1 KB of each for the system."""

_H200 = 132
_CLUSTERS = {  # ctas: {split: clusters}
    1: {2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15, 16: 7},
    2: {2: 132, 3: 79, 4: 62, 5: 47, 6: 39, 7: 32, 8: 30, 16: 14},
}
"""Clusters that run at one time on the 132 multiprocessors of an H200: cuOccupancyMaxActiveClusters, 2026-11.  Each
lies in one GPC, so that some multiprocessors stay idle: more than GPCs of 18 and 16 explain.  Three ctas: 1.5 x two."""

_USABLE = 0.85
"""Of other machines, clusters of more than two can use about so much: 112 of 132 at the median of the table, 102 at the
least.  A grid that does not fit is computed right, only later."""


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory of a block: the ring with its barriers, and what its warpgroup has."""
    return config.stages * (_stage_bytes(config.tokens) + 16) + _fixed_bytes(config.tokens, config.split)


def _stage_bytes(tokens: int) -> int:
    return (_BLOCK_N + tokens) * _BLOCK_K * 2


def _fixed_bytes(tokens: int, split: int) -> int:
    """What lies beside the ring: parcels received from the cluster, the result, two barriers."""
    share = -(-tokens // 8 // split)  # parcels of eight tokens that a block of a cluster owns
    received = split * share * _PARCEL if split > 1 else 0
    return received + share * 8 * _PITCH * 4 + 16


def _resident(split: int, ctas: int, processors: int) -> int:
    """Clusters that run at one time."""
    if split == 1:
        return processors * ctas
    if processors != _H200 or split not in _CLUSTERS[1]:
        return max(1, int(processors * ctas * (1 if split == 2 else _USABLE)) // split)
    return _CLUSTERS[ctas][split] if ctas in _CLUSTERS else _CLUSTERS[2][split] * ctas // 2


def _tiles(config: Config, rows: int, columns: int) -> int:
    return -(-rows // config.tokens) * -(-columns // _BLOCK_N)


def _steps(depth: int) -> int:
    return -(-depth // _BLOCK_K)


# ---------------------------------------------------------------------------------------------------- what to choose

_READ = 4.3e6  # bytes a microsecond: the memory
_L2 = 8e6  # the L2
_PROCESSOR = 100e3  # one multiprocessor
_IDLE = 0.1  # idle multiprocessors leave the memory a little less busy: its rate goes with this power of their share
_STEP = 0.1  # microseconds of a warpgroup for a stage that has landed
_EPILOGUE = 1.0 / MAX_ROWS  # and for each token of a tile
_MEETING = 0.02 / MAX_ROWS  # and for each token and block of a cluster whose sums are sent; the ring does not hide it
_AHEAD = 0.3  # of the ring holds bytes of the next tile as a round ends


def predicted_us(config: Config, rows: int, columns: int, depth: int) -> float:
    """Microseconds from the first byte asked for to the last sum written, without what all configs have in common.

    Full rounds of the clusters that run at one time take as long as their bytes or their arithmetic.  The last round
    has fewer clusters: they share the memory and the L2, each block up to what its multiprocessor takes in, and part of
    their bytes came while the round before ended.  The constants are fitted to 52 pairs of shape and M, timed on an
    H200 before grids followed `_CLUSTERS` (M = 1 and 16 also before fetching ahead, and corrected by what that gained).
    On these same pairs what `configure` chooses is 1.6 % from the best with these tiles on average, 12 % at worst.
    """
    weights, both = _BLOCK_N * _BLOCK_K * 2, (_BLOCK_N + min(rows, config.tokens)) * _BLOCK_K * 2
    steps = -(-_steps(depth) // config.split)

    def step(clusters: int) -> float:
        """One stage for each block of so many clusters."""
        share = clusters * config.split / _H200  # blocks a multiprocessor
        memory = share * _H200 * weights / _READ / min(1, share) ** _IDLE
        return max(memory, share * _H200 * both / _L2, max(1, share) * both / _PROCESSOR)

    resident = _resident(config.split, config.ctas, _H200)
    rounds, rest = divmod(_tiles(config, rows, columns), resident)
    epilogue = _EPILOGUE * config.tokens
    meeting = _MEETING * config.tokens * config.split if config.split > 1 else 0
    full = rounds * (max(steps * step(resident), steps * _STEP + epilogue) + meeting)
    landed = _AHEAD * min(steps, config.stages) if rounds else 0
    return full + ((steps - landed) * step(rest) + meeting if rest else 0) + epilogue


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """The config of the least predicted time among `CONFIGS` whose tokens hold the bucket's rows."""
    rows, columns, depth = bucket[:3]
    return _ranked(CONFIGS, rows, columns, depth)[0]


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """The 24 of least predicted time."""
    rows, columns, depth = bucket[:3]
    space = (_config(_tokens(rows), split, ctas) for ctas in _SHARED for split in (1, *_CLUSTERS[1]))
    return tuple(_ranked((c for c in space if c is not None), rows, columns, depth)[:24])


def _ranked(configs: Iterable[Config], rows: int, columns: int, depth: int) -> list[Config]:
    """Best first: those whose tokens fit `rows`, with K for every block of a cluster."""
    fitting = [c for c in configs if c.tokens == _tokens(rows) and c.split <= _steps(depth)]
    return sorted(fitting, key=lambda c: predicted_us(c, rows, columns, depth))


def _tokens(rows: int) -> int:
    return next((t for t in _TOKENS if t >= rows), _TOKENS[-1])


def _config(tokens: int, split: int, ctas: int) -> Config | None:
    """The config with the deepest ring; None if it keeps too little of the weights on their way."""
    stages = (_SHARED[ctas] - _fixed_bytes(tokens, split)) // (_stage_bytes(tokens) + 16)
    in_flight = ctas * stages * _BLOCK_N * _BLOCK_K * 2
    return Config(tokens, stages, split, ctas) if stages >= 2 and in_flight >= _IN_FLIGHT else None


_TOKENS = (8, 16, 32, 64)
_IN_FLIGHT = 64 << 10  # bytes of weights a multiprocessor waits for, at least

# split, ctas: what measured best somewhere, or is needed between.  The model is 7 % off on average, which among more of
# them would choose worse; the tuner tries all.
_DEFAULTS = ((1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (6, 1), (6, 3), (8, 1))

CONFIGS: tuple[Config, ...] = tuple(
    made for tokens in _TOKENS for split, ctas in _DEFAULTS if (made := _config(tokens, split, ctas)) is not None
)
"""Every config that `configure` can return."""
