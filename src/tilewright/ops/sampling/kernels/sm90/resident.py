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
CONFIGS = tuple(Config(cluster, threads) for cluster in CLUSTERS for threads in (256, 512))
VECTOR = 16
PART = 190 << 10  # bytes of a row in one block, beside 33 KB of other memory
_MEDIUM = 100 << 10  # two blocks of a multiprocessor, or three up to 64 KB
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
    """Chooses the fewest blocks of at most 100 KB of a row that give two to each multiprocessor, where two or three of
    256 threads run at once.  Up to eight rows have 16 blocks of 512 threads; none has less than 2048 elements.
    """
    # H100, 2026-11, top-k and top-p of 131072 in float32: 128 rows 51.6 us (4 blocks 76.7, 16 blocks 73.2; 512 threads
    # 54.0), 32 rows 18.8 (16 blocks 25.5), 1 row 9.7 (256 threads 10.1, 8 blocks 10.1)
    fitting = [cluster for cluster in CLUSTERS if _fits(n, dtype, cluster)]
    for cluster in fitting:
        if n <= 2048 * cluster:
            return Config(cluster, 512)
        if m > 8 and m * cluster >= 256 and part_vectors(n, dtype, cluster) * VECTOR <= _MEDIUM:
            return Config(cluster, 256)
    return Config(fitting[-1], 512 if m <= 8 else 256) if fitting else None


def candidates(n: int, dtype: torch.dtype) -> tuple[Config, ...]:
    return tuple(c for c in CONFIGS if _fits(n, dtype, c.cluster) and (n >= 256 * c.cluster or c.cluster == 1))
