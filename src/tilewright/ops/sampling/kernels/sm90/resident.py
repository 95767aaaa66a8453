"""How rows are divided among the blocks of a cluster, which hold them in shared memory."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.hardware.device import device_info
from tilewright.ops.rows import no_float64


class Config(NamedTuple):
    """cluster: blocks of a row.   threads: of a block."""

    cluster: int
    threads: int


CLUSTERS = (1, 2, 4, 8, 16)
CONFIGS = tuple(Config(cluster, 512) for cluster in CLUSTERS)
SPACE = tuple(Config(cluster, threads) for cluster in CLUSTERS for threads in (256, 512, 1024))
VECTOR = 16
PART = 200 << 10  # bytes of a row in one block, beside 16 KB of other memory
_LIST = 16384  # the list of `short_list.cuh`, in the place of the row


def part_vectors(n: int, dtype: torch.dtype, cluster: int) -> int:
    """Vectors of 16 bytes in each part of a row of n elements that begins anywhere."""
    width = VECTOR // dtype.itemsize
    return -(-((n + 2 * (width - 1)) // width) // cluster)


def row_offset(threads: int) -> int:
    """Bytes before the part of a row: barriers, numbers of exchanges, a list (`SampleMemory`)."""
    return 8704 + threads // 32 * 80


def shared_bytes(threads: int, vectors: int) -> int:
    """Shared memory of a block."""
    return row_offset(threads) + max(vectors * VECTOR, _LIST)


def why_not_arch(x: Tensor) -> str | None:
    """Why no kernel of this folder runs on the device of x; None if they do."""
    arch = device_info(x.device).arch
    return None if arch == "sm_90" else f"is written for Hopper's clusters (sm_90), and this is {arch}"


def why_not(x: Tensor) -> str | None:
    """Why rows of x cannot be held; None if they can."""
    if (reason := why_not_arch(x)) is not None:
        return reason
    if not _fits(x.shape[-1], x.dtype, CLUSTERS[-1]):
        return f"holds a row in {CLUSTERS[-1]} blocks of {PART >> 10} KB, got {x.shape[-1]} of {x.dtype}"
    return no_float64(x)


def _fits(n: int, dtype: torch.dtype, cluster: int) -> bool:
    return part_vectors(n, dtype, cluster) * VECTOR <= PART


def configure(m: int, n: int, dtype: torch.dtype) -> Config | None:
    """Chooses blocks of at least 2048 elements and at most 64 KB, and of these as many as fill 132 multiprocessors.
    Unmeasured.
    """
    fitting = [cluster for cluster in CLUSTERS if _fits(n, dtype, cluster)]
    if not fitting:
        return None
    for cluster in fitting:
        fills = m * cluster >= 128 and part_vectors(n, dtype, cluster) * VECTOR <= 64 << 10
        if fills or n <= 2048 * cluster:
            return Config(cluster, 512)
    return Config(fitting[-1], 512)


def candidates(n: int, dtype: torch.dtype) -> tuple[Config, ...]:
    return tuple(config for config in SPACE if _fits(n, dtype, config.cluster) and n >= 256 * config.cluster)
