"""Dense GEMM in CUDA C++ for Hopper: tiles of 64 or 128 rows, the tensor cores busy from the first tile to the last.

A tile of 128x256 takes 128 * 256 * 64 * 2 flops for each 48 KB that its SM loads; loads, epilogue and stores overlap
the WGMMAs.  So 8192x8192x8192 cannot beat 1.1 ms at 989 TFLOP/s; under the power limit it takes 1.56, cuBLAS 1.59
(H200, 2026-11).  The choice left is the tile, which decides how full the last wave is: see `cost_model.py`.

Tiles are padded along M, so up to 64 rows of A, contiguous along K, go to `few_rows_cuda.py`.
"""

import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright import settings
from tilewright.hardware.device import device_info
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.collect import collecting
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tensor_map import TensorMap, tensor_map
from tilewright.log import log_once
from tilewright.ops.gemm.kernels.sm90 import cost_model
from tilewright.ops.gemm.kernels.sm90 import operands as sm90_operands
from tilewright.ops.gemm.kernels.sm90.cost_model import Problem, Tile
from tilewright.ops.gemm.operands import ACTIVATIONS, Major, columns_out, major_a, major_b

_SPAN, _BLOCK_K = 128, 64  # as in the header: bytes and elements of K in a stage
_SHARED = 232448 - 1024  # bytes a block may have, without its barriers
_GATED = 1  # the epilogue of a bucket, as in `raw.py`
_STAGING = 2 * 64 * _SPAN  # bytes of D that a warpgroup stages
_MAX_STAGES = 10


class Config(NamedTuple):
    """block_m x block_n of D for a block; stages of the ring; blocks of a cluster, at most two, along M or along N;
    band: rows of tiles in a group of the tile order (GROUP_SIZE_M).
    """

    block_m: int
    block_n: int
    stages: int
    cluster_m: int
    cluster_n: int
    band: int


class Params(NamedTuple):
    """The compile-time constants of sm90_gemm."""

    kBlockM: int
    kBlockN: int
    kStages: int
    kClusterM: int
    kClusterN: int
    kMajorA: int
    kMajorB: int
    kActivation: int
    kBias: bool
    kAddend: int
    Element: torch.dtype
    Out: torch.dtype
    Bias: torch.dtype
    Addend: torch.dtype
    kWalk: int = 0
    kInto: bool = False


@dataclass(frozen=True)
class Groups:
    """Groups of A's rows (ROWS) or of K (DEPTH), for the tile schedulers of the header; DENSE is a batch of products.

    count: number of groups.  starts, ends: int32 on the device.  batched: A and D have a matrix for each group.
    """

    walk: int
    count: int = 0
    starts: Tensor | int = 0
    ends: Tensor | int = 0
    batched: bool = False


DENSE, ROWS, DEPTH = range(3)
NO_GROUPS = Groups(DENSE)

KERNEL = CudaKernel(
    Path(__file__).with_name("dense.cuh"),
    "sm90_gemm",
    "TTTPPPfqqPqqPP?iiiii",
    archs=("sm_90a",),
    dependent=True,
)


def why_not(
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
    if major_a(a) is None or major_b(b) is None:
        return "needs a and b contiguous along one of their last two dimensions"
    return sm90_operands.why_not(a, b, bias, c, activation, out_dtype)


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
    groups: Groups = NO_GROUPS,
) -> None:
    """d = act(alpha * scale * a @ b + bias) + c.  See `engines/__init__.py`; with `groups`, `ops/grouped/engines/`."""
    accumulate = c is not None and sm90_operands.adds_in_place(c, d)
    if c is not None and collecting() is not None and not accumulate and c.dtype == d.dtype == torch.float32:
        gemm(
            d, a, b, bias, d, scale, alpha, activation, config, groups
        )  # fake tensors have no address: compile both variants
    addend = None if accumulate else c
    m, k = a.shape[1:]
    n = b.shape[-1]
    batches = groups.count or a.shape[0]
    along_m, along_n = major_a(a) is Major.MN, major_b(b) is Major.MN
    strip = cost_model.strip_bytes(columns_out(config.block_n, activation) * d.itemsize)
    maps = (
        _operand(a.mT if along_m else a, along_m, config.block_m, config.cluster_n),
        _operand(b if along_n else b.mT, along_n, config.block_n, config.cluster_m),
        tensor_map(d, (1, 64, strip // d.itemsize), swizzle=strip),
    )
    params = Params(
        kBlockM=config.block_m,
        kBlockN=config.block_n,
        kStages=config.stages,
        kClusterM=config.cluster_m,
        kClusterN=config.cluster_n,
        kMajorA=int(along_m),
        kMajorB=int(along_n),
        kActivation=ACTIVATIONS.index(activation),
        kBias=bias is not None,
        kAddend=0 if addend is None else 2 if sm90_operands.in_pairs(addend) else 1,
        Element=a.dtype,
        Out=d.dtype,
        Bias=d.dtype if bias is None else bias.dtype,
        Addend=d.dtype if addend is None else addend.dtype,
        kWalk=groups.walk,
        kInto=accumulate,
    )
    args = (
        *maps,
        0 if bias is None else bias,
        0 if addend is None else addend,
        0 if scale is None else scale,
        alpha,
        *((0, 0) if addend is None else (addend.stride(1), addend.stride(0))),
        *((d, d.stride(1), d.stride(0)) if groups.walk == ROWS else (0, 0, 0)),
        *(groups.starts, groups.ends, groups.batched),
        *(m, n, k, batches, config.band),
    )
    cluster = config.cluster_m * config.cluster_n
    units = -(-m // (config.block_m * config.cluster_m)) * -(-n // (config.block_n * config.cluster_n)) * batches
    blocks = max(1, min(units, usable_sms(d.device) // cluster)) * cluster
    KERNEL(
        (blocks,),
        args,
        params,
        block=128 * (1 + _math_warpgroups(config.block_m)),
        shared_bytes=config.stages * stage_bytes(config.block_m, config.block_n, along_n)
        + _math_warpgroups(config.block_m) * _STAGING,
        cluster=(cluster, 1, 1) if cluster > 1 else None,
    )


def _operand(operand: Tensor, mn_major: bool, block: int, shared: int) -> TensorMap | None:
    """Returns the map of an operand whose last dimension is contiguous, for one of `shared` blocks that share a tile.

    operand: (B, M or N, K); with mn_major (B, K, M or N), loaded in boxes of 64 columns.
    """
    return tensor_map(operand, (1, (_BLOCK_K if mn_major else block) // shared, 64), swizzle=_SPAN)


# ------------------------------------------------------------------------------------------------------- what to choose

_BLOCKS = {64: (32, 64, 96, 128, 192, 256), 128: tuple(range(64, 257, 16))}
_CLUSTERS = ((1, 1), (2, 1), (1, 2))
TILES = tuple(Tile(m, n, *cluster) for m, columns in _BLOCKS.items() for n in columns for cluster in _CLUSTERS)
"""All tiles to choose from.  256x128, two tiles of accumulators a warpgroup, was never faster than 128x256."""


def configure(bucket: tuple[int, ...], dtype: torch.dtype, batch: int = 1) -> Config:
    """Returns the tile of the least predicted time for M, N, K, layout, aligned, out_bits, epilogue."""
    sms = device_info("cuda").sm_count or 132
    config = _configure(tuple(bucket), batch, sms)
    if settings.current().print_configs:
        tile = Tile(config.block_m, config.block_n, config.cluster_m, config.cluster_n)
        prediction = cost_model.predict(_problem(bucket, batch, sms), tile)
        log_once(
            ("dense", bucket, batch),
            f"dense GEMM {tuple(bucket)} on {sms} SMs: {config}, {prediction}",
            logging.WARNING,
        )
    return config


@cache
def _configure(bucket: tuple[int, ...], batch: int, sms: int) -> Config:
    problem = _problem(bucket, batch, sms)
    return _config(cost_model.rank(problem, _legal(problem))[0][0], problem)


def candidates(bucket: tuple[int, ...], dtype: torch.dtype, batch: int = 1) -> tuple[Config, ...]:
    """Returns the eight tiles of the least predicted time, each with several bands."""
    problem = _problem(bucket, batch, device_info("cuda").sm_count or 132)
    configs = []
    for tile, _ in cost_model.rank(problem, _legal(problem))[:8]:
        config = _config(tile, problem)
        configs += [config, *(config._replace(band=band) for band in (4, 8, 16) if band != config.band)]
    return tuple(configs)


def _problem(bucket: tuple[int, ...], batch: int, sms: int) -> Problem:
    m, n, k, layout, _, out_bits, epilogue = bucket
    return Problem(
        m, n, k, out_bytes=out_bits // 8, gated=epilogue == _GATED, mn_major_b=layout in (1, 2), batch=batch, sms=sms
    )


def _legal(problem: Problem) -> tuple[Tile, ...]:
    """Returns the tiles that fit: gated ones write whole strips of 32 bytes; a cluster needs two tiles that share."""
    return tuple(
        tile
        for tile in TILES
        if not problem.gated or tile.block_n % 32 == 0
        if tile.cluster_m == 1 or problem.m > tile.block_m
        if tile.cluster_n == 1 or problem.n > tile.block_n
    )


def _config(tile: Tile, problem: Problem) -> Config:
    free = _SHARED - _math_warpgroups(tile.block_m) * _STAGING
    stages = min(_MAX_STAGES, free // stage_bytes(tile.block_m, tile.block_n, problem.mn_major_b))
    band = cost_model.band(tile, problem.sms)
    return Config(tile.block_m, tile.block_n, stages, tile.cluster_m, tile.cluster_n, band)


def _math_warpgroups(block_m: int) -> int:
    """Returns the number of math warpgroups."""
    return 1 if block_m == 64 else 2


def stage_bytes(block_m: int, block_n: int, mn_major_b: bool) -> int:
    """Returns the bytes of A and B in a stage; a B that is contiguous along N fills boxes of 64 columns."""
    return (block_m + (-(-block_n // 64) * 64 if mn_major_b else block_n)) * _SPAN


CONFIGS: tuple[Config, ...] = tuple(
    dict.fromkeys(
        _config(tile, Problem(1, 1, 1, mn_major_b=along_n, sms=132)) for along_n in (False, True) for tile in TILES
    )
)
"""Every config that `configure` can return on a GPU of 132 multiprocessors."""
