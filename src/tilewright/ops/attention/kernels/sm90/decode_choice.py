"""Configurations of the kernel of attention over a KV cache for Hopper, and which one a call gets."""

from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

import torch

from tilewright.ops.attention.paged.args import AS_QUERIES, TOKEN_SCALES, PagedBucket

WIDTHS = (64, 128, 256)
ROWS = (8, 16, 32)
"""Query rows of a row tile; more of a sequence are several, each of which reads the keys."""
_SHARED = 219 << 10  # of 227 KB: the second kernel has its place beside a block
_PART_BYTES = 20  # as in fmha_decode/layout.cuh
_MOST_STAGES = 6
MOST_SUMS = 2048  # in a warp's registers, 64 of each thread; of 4096 ptxas spills
CLUSTERS = (16, 8, 4, 2)
_PROCESSORS = 132
# Measured on an H200 (docs/notes/2026-11-decode.md), in bytes a nanosecond: of memory with four warps and with eight;
# of a block, of 16 bits and (guessed) of one that widens e4m3; of a cluster of 16
# blocks and of smaller ones
_RATES = {4: 4270.0, 8: 4480.0}
_BLOCK_RATE, _WIDENING_RATE = 70.0, 35.0
_LARGE_CLUSTER_RATE, _CLUSTER_RATE = 820.0, 470.0
_CLUSTER_US = {4: 6.2, 8: 5.6}
_TWO_KERNELS_US = {4: 8.0, 8: 9.1}  # beside eight warps the second kernel finds no registers until they are done
_RESIDENT = 64  # blocks of eight warps that find room at once, in clusters of four and more; in pairs twice as many
_UNEVEN = 1.04  # what clusters must gain where lengths may differ: a short sequence has as many blocks as a long one


class Division(Enum):
    """How blocks share the keys, as in fmha_decode/division.cuh."""

    EQUAL = 0
    OWN = 1
    CLUSTER = 2


class Config(NamedTuple):
    """rows: of a row tile; keys: of a unit; warps of a block, each with a ring of `stages` units.

    shares: blocks of a multiprocessor, where all have equal shares.   cluster: blocks that divide one row tile and read
    each other's shared memory, 1 for equal shares and a second kernel.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    shares: int = 1
    cluster: int = 1


class Unit(NamedTuple):
    """What the keys of a call are read in: bytes of a row of keys, and of the scales of its key and its value."""

    width: int
    row_bytes: int
    scale_bytes: int

    @property
    def keys(self) -> int:
        """8 KB of keys and values; a lane looks up the page of one key, so at most 32."""
        return 16 if self.row_bytes >= 256 else 32

    @property
    def stage_bytes(self) -> int:
        return self.keys * (2 * self.row_bytes + self.scale_bytes)


def shared_bytes(params: Any) -> int:
    """Dynamic shared memory, as fmha_decode/layout.cuh divides it."""
    unit = Unit(params.kD, params.kD * params.Cache.itemsize, 8 if params.kTokenScales else 0)
    stage = params.kKeys * (2 * unit.row_bytes + unit.scale_bytes)
    return _shared(params.kWarps, params.kStages, stage, params.kRows, params.kD, params.kCluster)


def _shared(warps: int, stages: int, stage_bytes: int, rows: int, width: int, cluster: int) -> int:
    each = stages * stage_bytes + 2 * _PART_BYTES
    if cluster > 1:
        return warps * each + rows * width * 4 + cluster * rows * 8
    return warps * (each + _sums(rows, width))


def _sums(rows: int, width: int) -> int:
    return rows * (width + 4) * 4 + rows * 8


def ring(unit: Unit, rows: int, warps: int, blocks: int, cluster: int) -> Config | None:
    """The deepest rings of `blocks` of a multiprocessor; None if they hold less than two units, or than the sums of a
    warp, which take their place in the end.
    """
    room = _SHARED // blocks - (blocks > 1) * 1024
    stages = _MOST_STAGES
    while stages > 1 and _shared(warps, stages, unit.stage_bytes, rows, unit.width, cluster) > room:
        stages -= 1
    if stages == 1 or stages * unit.stage_bytes < _sums(rows, unit.width) or rows * unit.width > MOST_SUMS:
        return None
    return Config(rows, unit.keys, warps, stages, blocks, cluster)


def space(unit: Unit, rows: int) -> Iterable[Config]:
    """Blocks of eight warps, or of four, one or two on a multiprocessor, with equal shares, and in clusters."""
    for warps, blocks in ((8, 1), (4, 1), (4, 2)):
        config = ring(unit, rows, warps, blocks, 1)
        if config is not None:
            yield config
    for cluster in CLUSTERS:
        for warps, blocks in ((8, 1), (4, 2)):
            config = ring(unit, rows, warps, blocks, cluster)
            if config is not None:
                yield config._replace(shares=1)


def candidates(bucket: PagedBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Rings that fill shared memory.

    Clusters are for few row tiles, as each of them has as many blocks whatever its length is; over e4m3, where they
    were not measured, for one sequence.
    """
    rows = next((n for n in ROWS if n >= max(bucket.S_q, 1) * bucket.group), 0)
    if not 0 < rows * bucket.D <= MOST_SUMS or bucket.D not in WIDTHS or (not bucket.S_q and bucket.T > bucket.B):
        return ()
    tiles = bucket.B * bucket.H_kv
    few = bucket.S_q > 0 and (bucket.B == 1 or bucket.cache == AS_QUERIES)
    choices = space(unit_of(bucket.D, bucket.cache, dtype), rows)
    return tuple(c for c in choices if c.cluster == 1 or (few and tiles * c.cluster <= 2 * _PROCESSORS))


def unit_of(width: int, cache: int, dtype: torch.dtype) -> Unit:
    """The unit of a cache of heads of `width`."""
    return Unit(width, width * (dtype.itemsize if cache == AS_QUERIES else 1), 8 if cache == TOKEN_SCALES else 0)


def configure(bucket: PagedBucket, dtype: torch.dtype) -> Config | None:
    """The candidate of least predicted time; the first of equals."""
    choices = candidates(bucket, dtype)
    return min(choices, key=lambda config: predicted_us(bucket, dtype, config)) if choices else None


def predicted_us(bucket: PagedBucket, dtype: torch.dtype, config: Config) -> float:
    """Time of a call whose sequences fill their capacity.

    A cluster lies in one part of the GPU (GPC), which reads a share of memory's rate; equal shares read with all of
    them, and cost a second kernel.
    """
    unit = unit_of(bucket.D, bucket.cache, dtype)
    tiles = bucket.B * bucket.H_kv
    kilobytes = tiles * bucket.keys * (2 * unit.row_bytes + unit.scale_bytes) / 1e3
    of_block = _BLOCK_RATE if bucket.cache == AS_QUERIES else _WIDENING_RATE * config.warps / 8
    memory = _RATES[config.warps]
    if config.cluster == 1:
        return _TWO_KERNELS_US[config.warps] * config.shares + kilobytes / min(memory, _PROCESSORS * of_block)
    blocks = tiles * config.cluster
    resident = _RESIDENT * (1 if config.cluster == 16 else 8 // config.warps) * (2 if config.cluster == 2 else 1)
    of_cluster = _LARGE_CLUSTER_RATE if config.cluster == 16 else _CLUSTER_RATE
    rate = min(memory, of_cluster * tiles, blocks * of_block)
    rounds = 1 if blocks <= resident else 2
    return (_CLUSTER_US[config.warps] + kilobytes / rate) * rounds * (_UNEVEN if bucket.B > 1 else 1)


def configs() -> tuple[Config, ...]:
    """Every config that `configure` and `candidates` can return."""
    units = [unit_of(width, cache, torch.bfloat16) for width in WIDTHS for cache in range(TOKEN_SCALES + 1)]
    return tuple(dict.fromkeys(config for unit in units for rows in ROWS for config in space(unit, rows)))
