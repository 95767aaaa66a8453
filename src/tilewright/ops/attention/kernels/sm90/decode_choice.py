"""Configurations of the kernel of attention over a KV cache for Hopper, and which one a call gets."""

from enum import Enum
from typing import Any, NamedTuple

import torch

from tilewright.ops.attention.paged.args import AS_QUERIES, TOKEN_SCALES, PagedBucket

_SHARED = 227 << 10
_MERGED_COLUMNS, _PITCH = 64, 68  # as in fmha_decode/layout.cuh
MOST_ROWS = 16


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


def shared_bytes(params: Any, division: Division) -> int:
    """Dynamic shared memory, as fmha_decode/layout.cuh divides it."""
    row = params.kD * params.Cache.itemsize
    stage = 2 * params.kKeys * row + (8 * params.kKeys if params.kTokenScales else 0)
    warps = params.kWarps * (params.kStages * stage + 8 * _PITCH * 4 + params.kRows * 8)
    return warps + (params.kRows * (params.kD + 2) * 4 if division is Division.CLUSTER else 0)


def configure(bucket: PagedBucket, dtype: torch.dtype) -> Config | None:
    """The first candidate."""
    return next(iter(candidates(bucket, dtype)), None)


def candidates(bucket: PagedBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Rings that fill shared memory."""
    rows = -(-max(bucket.S_q, 1) * bucket.group // 8) * 8
    if rows > MOST_ROWS or (not bucket.S_q and bucket.T > bucket.B):
        return ()
    row_bytes = bucket.D * (dtype.itemsize if bucket.cache == AS_QUERIES else 1)
    keys = 16 if row_bytes >= 256 else 32
    stage = 2 * keys * row_bytes + (8 * keys if bucket.cache == TOKEN_SCALES else 0)
    found = []
    for warps in (8, 4):
        for shares in (1, 2):
            fixed = warps * (8 * _PITCH * 4 + rows * 8) + rows * (bucket.D + 2) * 4
            room = (_SHARED - (8 << 10)) // shares - fixed - (1 << 10)
            stages = min(room // (warps * stage), 8)
            if stages >= 2:
                found.append(Config(rows, keys, warps, stages, shares))
    return tuple(found)


def configs() -> tuple[Config, ...]:
    """Every config that `configure` can return."""
    return ()
