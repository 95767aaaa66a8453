"""Configurations of kernels whose programs hold blocks of whole rows in registers: the norms."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton

from tilewright.hardware import device_info
from tilewright.ops.rows import PlainRowsBucket, RowsBucket

MAX_BLOCK = 16384  # 64 KB of float32 in registers at 16 warps; longer rows are read in blocks, twice


class Config(NamedTuple):
    rows: int  # rows per program
    num_warps: int


class PersistentConfig(NamedTuple):
    """Persistent programs: each loops over blocks of rows and leaves one partial weight gradient."""

    rows: int  # rows per block
    num_warps: int
    num_stages: int
    ctas_per_sm: int  # programs per SM


def configure_backward(bucket: RowsBucket | PlainRowsBucket, dtype: torch.dtype) -> PersistentConfig:
    block = min(triton.next_power_of_2(bucket.N), MAX_BLOCK)
    if block <= 512:
        rows = max(1, min(8, 4096 // (block * dtype.itemsize)))
        return PersistentConfig(rows, num_warps=4, num_stages=2, ctas_per_sm=4)
    if dtype.itemsize > 2:  # two stages of one row: three of two would not fit the shared memory of an A100
        num_warps = min(16, max(4, block // 512))
        return PersistentConfig(rows=1, num_warps=num_warps, num_stages=2, ctas_per_sm=max(2, 16 // num_warps))
    # Several rows a block, and two more blocks in flight, hide the reductions: 55.6 us with two rows, 57.2 with one at
    # 8192x4096; 34.6 us with four, 36.8 with two for LayerNorm at 8192x1600 (H200, 2026-11)
    if block <= 2048:
        return PersistentConfig(rows=4, num_warps=4, num_stages=3, ctas_per_sm=2)
    rows = 2 if block <= 4096 else 1
    return PersistentConfig(rows, num_warps=min(16, rows * block // 1024), num_stages=3, ctas_per_sm=1)


def candidates(bucket: RowsBucket | PlainRowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Configurations with 4 to 64 elements of x a thread."""
    block = triton.next_power_of_2(bucket.N)
    if block > MAX_BLOCK:
        return ()
    return tuple(
        Config(rows, warps)
        for rows in (1, 2, 4, 8, 16, 32)
        for warps in (1, 2, 4, 8, 16, 32)
        if rows <= bucket.M and 4 <= rows * block // (32 * warps) <= 64 and rows * block <= 2 * MAX_BLOCK
    )


def candidates_backward(bucket: RowsBucket | PlainRowsBucket, dtype: torch.dtype) -> tuple[PersistentConfig, ...]:
    """Configurations with 8 to 64 elements of dy and of x a thread; the stages fit the shared memory of an H200."""
    block = triton.next_power_of_2(bucket.N)
    if block > MAX_BLOCK:
        return ()
    return tuple(
        PersistentConfig(rows, warps, stages, ctas_per_sm)
        for rows in (1, 2, 4, 8)
        for warps in (4, 8, 16)
        for stages in (2, 3, 4)
        for ctas_per_sm in (1, 2, 4)
        if rows <= bucket.M
        and 8 <= rows * block // (32 * warps) <= 64
        and ctas_per_sm * stages * 2 * rows * block * dtype.itemsize <= 200 << 10
        and 8 <= ctas_per_sm * warps <= 32
    )


def every(choose: Callable[[RowsBucket, torch.dtype], Any]) -> tuple[Any, ...]:
    """All configurations that `choose` can return."""
    sizes = [RowsBucket(m, 1 << k) for m in (1, 1 << 13, 1 << 20) for k in range(15)]
    return tuple(dict.fromkeys(choose(bucket, dtype) for bucket in sizes for dtype in (torch.bfloat16, torch.float32)))


def programs(m: int, config: PersistentConfig, device: torch.device) -> int:
    """Number of persistent programs for `m` rows."""
    return min(-(-m // config.rows), config.ctas_per_sm * device_info(device).sm_count)
