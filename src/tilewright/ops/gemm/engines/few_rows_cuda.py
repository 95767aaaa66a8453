"""Few rows of A, at most 64, against weights that are read once: CUDA C++ for Hopper.

The time is that of reading B: N * K * 2 bytes at 4.4 TB/s, 6.9 us for 2112 x 7168.  The matrix units idle; what counts
is that every multiprocessor has 64 KB or more on their way at any time, from the first microsecond to the last.  Hence
small tiles of weights, K split over the blocks of a cluster where there are too few tiles, rings that run on from tile
to tile, and a start that overlaps the end of the kernel before (programmatic dependent launch).

Rows of A ("tokens") come from the L2 once for every tile of weights: tokens / block_n bytes for each byte of weights.
At 64 tokens that doubles what the L2 delivers if block_n is 64, and adds a quarter if it is 256: the model below knows.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.hardware.device import device_info
from tilewright.jit.collect import collecting
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tensor_map import tensor_map
from tilewright.ops.gemm.operands import ACTIVATIONS, Major, aligned, columns_out, major_a, major_b

MAX_ROWS = 64
_INPUTS = (torch.bfloat16, torch.float16)
_OUTPUTS = (*_INPUTS, torch.float32)
_CHUNK, _SPAN = 64, 128  # as in the header: elements and bytes of a box's row
_PITCH, _PARCEL = 68, 2048  # floats of a row of the result, bytes of 64 x 8 sums
_WIDTH = 4  # results that a thread stores at once


class Config(NamedTuple):
    """block_n: weight rows of a block, 64 for each math warpgroup.  block_k: of K in a stage, 64 or 128.
    tokens: rows of A in a tile.  stages: of the ring.  split: blocks of a cluster that share K.
    ctas: blocks that fit a multiprocessor.  persistent: clusters stay and take several tiles, else each takes one.
    """

    block_n: int
    block_k: int
    tokens: int
    stages: int
    split: int
    ctas: int
    persistent: bool


class Params(NamedTuple):
    """What few_rows_gemm is compiled for."""

    kBlockN: int
    kBlockK: int
    kTokens: int
    kStages: int
    kSplit: int
    kCtas: int
    kAhead: int
    kOverlap: bool
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
    if a.dtype not in _INPUTS or b.dtype != a.dtype:
        return f"multiplies bf16 or fp16 operands of one dtype, got {a.dtype} and {b.dtype}"
    if any(dtype not in _OUTPUTS for dtype in (out_dtype, *(t.dtype for t in (bias, c) if t is not None))):
        return "takes a bias, an addend and a result of bf16, fp16 or fp32"
    if a.shape[-2] > MAX_ROWS:
        return f"is for at most {MAX_ROWS} rows of a, got {a.shape[-2]}"
    if major_a(a) is not Major.K or major_b(b) is None:
        return "needs a contiguous along K, and b along K or N"
    if not aligned(a, b, columns_out(b.shape[-1], activation), out_dtype):
        return "needs addresses, strides and rows of the result that are multiples of 16 bytes"
    return None


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
    along_n = major_b(b) is Major.MN
    token_rows = min(rows, config.tokens)  # rows that do not exist are not read: their sums are never stored
    if along_n:
        weights = tensor_map(b, (1, _CHUNK, _CHUNK), swizzle=_SPAN)
    else:
        weights = tensor_map(b.mT, (1, config.block_n, _CHUNK), swizzle=_SPAN)
    tokens = tensor_map(a, (1, token_rows, _CHUNK), swizzle=_SPAN)
    params = Params(
        kBlockN=config.block_n,
        kBlockK=config.block_k,
        kTokens=config.tokens,
        kStages=config.stages,
        kSplit=config.split,
        kCtas=config.ctas,
        kAhead=2 if config.ctas == 1 else 1,
        kOverlap=config.ctas == 1,
        kMnMajor=along_n,
        kActivation=ACTIVATIONS.index(activation),
        Element=a.dtype,
        Out=d.dtype,
        Bias=a.dtype if bias is None else bias.dtype,
        Addend=d.dtype if c is None else c.dtype,
    )
    args = (
        weights,
        tokens,
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
    clusters = batches * _tiles(config, rows, columns)
    if config.persistent:
        clusters = min(clusters, _resident(config.split, config.ctas, device_info(d.device).sm_count))
    KERNEL(
        (clusters * config.split,),
        args,
        params,
        block=2 * config.block_n + 32,
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

_PROCESSORS = (18, 18, 16, 16, 16, 16, 16, 16)
"""Multiprocessors of each GPC of an H200.  A cluster stays in one, so that some of them may find no work."""


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory of a block: the ring with its barriers, and what its warpgroups have."""
    return config.stages * _stage_bytes(config) + _fixed_bytes(config) + 16 * config.stages


def _stage_bytes(config: Config) -> int:
    return (config.block_n + config.tokens) * config.block_k * 2


def _fixed_bytes(config: Config) -> int:
    """What each math warpgroup has beside the ring: parcels received from its cluster, the result, two barriers."""
    share = -(-config.tokens // 8 // config.split)  # parcels of eight tokens that a block of a cluster owns
    received = config.split * share * _PARCEL if config.split > 1 else 0
    return config.block_n // 64 * (received + share * 8 * _PITCH * 4 + 16)


@cache
def _resident(split: int, ctas: int, processors: int) -> int:
    """Clusters that run at one time."""
    gpcs = _PROCESSORS if processors == sum(_PROCESSORS) else (processors,)
    return max(1, sum(size * ctas // split for size in gpcs))


def _tiles(config: Config, rows: int, columns: int) -> int:
    return -(-rows // config.tokens) * -(-columns // config.block_n)


# ---------------------------------------------------------------------------------------------------- what to choose

_READ = 4.4e6  # bytes a microsecond: the memory
_L2 = 6.0e6  # the L2
_PROCESSOR = 50e3  # one multiprocessor at most; more of them must take part to keep the memory busy
_LATENCY = 1.0  # microseconds from asking for bytes to having them, under load
_GATHER = 0.3  # microseconds to meet the other blocks of a cluster and add their sums, and 0.03 for each of them
_PLANNED = sum(_PROCESSORS)


def predicted_us(config: Config, rows: int, columns: int, depth: int) -> float:
    """Microseconds from the first byte asked for to the last sum written, without what all configs have in common.

    Clusters that run at one time share the memory; those that are left for a last, thinner round share it too, each up
    to what its multiprocessors can take in and its rings keep on the way.
    """
    tiles = _tiles(config, rows, columns)
    weights = columns * depth * 2 / -(-columns // config.block_n)
    both = weights + min(rows, config.tokens) * depth * 2

    def stream(clusters: int) -> float:
        if clusters == 0:
            return 0
        crowd = -(-clusters * config.split // _PLANNED)  # blocks on the fullest multiprocessor
        rate = min(_PROCESSOR / crowd, config.stages * _stage_bytes(config) / _LATENCY)
        return max(clusters * weights / _READ, clusters * both / _L2, both / config.split / rate)

    resident = _resident(config.split, config.ctas, _PLANNED)
    rounds, rest = divmod(tiles, resident)
    meeting = 0 if config.split == 1 else _GATHER + 0.03 * config.split
    return rounds * stream(resident) + stream(rest) + meeting


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """The config of the least predicted time among `CONFIGS` whose tokens hold the bucket's rows."""
    rows, columns, depth = bucket[:3]
    return _ranked(CONFIGS, rows, columns, depth)[0]


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """The 30 of least predicted time; and of those with more tiles than fit at one time, eight that do not persist."""
    rows, columns, depth = bucket[:3]
    space = (_config(*blocks, _tokens(rows), split) for blocks in _BLOCKS for split in _SPLITS)
    best = _ranked((c for c in space if c is not None), rows, columns, depth)[:30]
    several = [c for c in best if _tiles(c, rows, columns) > _resident(c.split, c.ctas, _PLANNED)]
    return (*best, *(c._replace(persistent=False) for c in several[:8]))


def _ranked(configs: Iterable[Config], rows: int, columns: int, depth: int) -> list[Config]:
    """Best first: those whose tokens fit `rows`, with K for every block of a cluster."""
    fitting = [c for c in configs if c.tokens == _tokens(rows) and c.split <= -(-depth // c.block_k)]
    return sorted(fitting, key=lambda c: predicted_us(c, rows, columns, depth))


def _tokens(rows: int) -> int:
    return next((t for t in _TOKENS if t >= rows), _TOKENS[-1])


def _config(block_n: int, ctas: int, tokens: int, split: int) -> Config | None:
    """The config with the deepest ring; None if it keeps too little of the weights on their way."""
    block_k = 128 if block_n == 64 and tokens <= 16 else 64  # stages of 16 KB of weights, 8 where tokens are many
    made = Config(block_n, block_k, tokens, 1, split, ctas, True)
    stages = (_SHARED[ctas] - _fixed_bytes(made)) // (_stage_bytes(made) + 16)
    in_flight = ctas * stages * block_n * block_k * 2
    return made._replace(stages=stages) if in_flight >= _IN_FLIGHT else None


_TOKENS = (8, 16, 32, 64)
_BLOCKS = ((64, 1), (64, 2), (64, 3), (128, 1), (128, 2), (256, 1))  # block_n, ctas
_SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
_IN_FLIGHT = 64 << 10  # bytes of weights a multiprocessor waits for, at least

# What `configure` chooses from: block_n, ctas and splits.  Up to 16 tokens cost little, and small tiles balance best.
_FEW = ((64, 1, (1, 2, 4, 8)), (64, 2, (1, 4)), (64, 3, (1,)), (128, 2, (1,)))
_MANY = ((64, 1, (8,)), (64, 2, (4,)), (128, 1, (1, 2, 4, 8)), (256, 1, (1, 2, 4, 8)))

CONFIGS: tuple[Config, ...] = tuple(
    made
    for tokens in _TOKENS
    for block_n, ctas, splits in (_FEW if tokens <= 16 else _MANY)
    for split in splits
    if (made := _config(block_n, ctas, tokens, split)) is not None
)
"""Every config that `configure` can return."""
