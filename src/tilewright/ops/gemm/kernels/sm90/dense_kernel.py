"""The launch of `dense.cuh`: tiles of 64 or 128 rows, the tensor cores busy from the first tile to the last.

A tile of 128x256 takes 128 * 256 * 64 * 2 flops for each 48 KB that its SM loads; loads, epilogue and stores overlap
the WGMMAs.  So 8192x8192x8192 cannot beat 1.1 ms at 989 TFLOP/s; under the power limit it takes 1.56, cuBLAS 1.59
(H200, 2026-11).
"""

from dataclasses import dataclass
from enum import IntEnum
from math import gcd
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.collect import collecting
from tilewright.jit.compilers.kernel_args import F32, I32, I64, Map, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tensor_map import TensorMap, tensor_map
from tilewright.ops.gemm.dense.args import MatmulArgs
from tilewright.ops.gemm.kernels.sm90.cost_model import strip_bytes
from tilewright.ops.gemm.kernels.sm90.few_rows_model import resident
from tilewright.ops.gemm.kernels.sm90.operands import adds_in_place, in_pairs
from tilewright.ops.gemm.operands import ACTIVATIONS, Major, columns_out, major_a, major_b

_SPAN, _BLOCK_K = 128, 64  # as in the header: bytes and elements of K in a stage
FEW_ROWS = 512  # the most for which boxes of rows and prefetches are worth a kernel of their own
_BOX_ROWS = 32, 16  # the least of a box of several: the first that divides a block's rows
STAGING = 2 * 64 * _SPAN  # bytes of D that a warpgroup stages


class Config(NamedTuple):
    """block_m x block_n of D for a block; stages of the ring; blocks that share an operand, at most two, along M or
    along N; group_m: rows of tiles in a group of the tile order (GROUP_SIZE_M); split: parts of K, a cluster has a
    block, or a pair that shares, for each.
    """

    block_m: int
    block_n: int
    stages: int
    cluster_m: int
    cluster_n: int
    group_m: int
    split: int = 1


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
    kGemmType: int = 0
    kAccumulate: bool = False
    kSplitK: int = 1
    kTrim: bool = False
    kPrefetch: bool = False
    kHalves: bool = False


class GemmType(IntEnum):
    """Which tile scheduler runs, as in tile_scheduler.cuh."""

    DENSE = 0
    """A batch of products."""
    GROUPED_M = 1
    """Groups of rows of A and D."""
    GROUPED_K = 2
    """Groups of K, each with its own D."""


class Args(NamedTuple):
    """The parameters of sm90_gemm."""

    map_a: Map
    map_b: Map
    map_d: Map
    bias: Pointer
    c: Pointer
    scale: Pointer
    alpha: F32
    c_pitch: I64
    c_batch: I64
    d: Pointer
    d_pitch: I64
    d_batch: I64
    starts: Pointer
    ends: Pointer
    masked: bool
    m: I32
    n: I32
    k: I32
    batches: I32
    group_m: I32
    box_m: I32


@dataclass(frozen=True)
class Groups:
    """Groups of a grouped product; DENSE has none.

    count: number of groups.  starts, ends: int32 on the device.  masked: A and D have a matrix for each group.
    """

    gemm_type: GemmType
    count: int = 0
    starts: Tensor | None = None
    ends: Tensor | None = None
    masked: bool = False


NO_GROUPS = Groups(GemmType.DENSE)

KERNEL = CudaKernel(Path(__file__).with_name("dense.cuh"), "sm90_gemm", Args, archs=("sm_90a",), dependent=True)


def gemm(d: Tensor, args: MatmulArgs, config: Config, groups: Groups = NO_GROUPS, *, halves: bool = False) -> None:
    """d = act(alpha * scale * a @ b + bias) + c.

    d: (B, M, N_out), contiguous along N_out; a: (B, M, K); b: (B, K, N); c: (B, M, N_out), may be d.  With `groups`,
    GROUPED_M: a (1 or G, R, K), b (G, K, N), d (1 or G, R, N_out); GROUPED_K: a (1, M, T), b (1, T, N), d (G, M, N).
    halves: the gate of "swiglu" is the first half of N, not every second column; b is contiguous along K, and dense.
    """
    a, b, bias, c, scale, alpha, activation, _ = args
    check_split(config.split, -(-a.shape[2] // _BLOCK_K))
    accumulate = c is not None and config.split == 1 and adds_in_place(c, d)
    if (
        config.split == 1
        and c is not None
        and collecting() is not None
        and not accumulate
        and c.dtype == d.dtype == torch.float32
    ):
        # Fake tensors have no address, so c may be d or not: compile both variants
        gemm(d, args._replace(c=d), config, groups)
    addend = None if accumulate else c
    m, k = a.shape[1:]
    n = b.shape[-1]
    batches = groups.count or a.shape[0]
    along_m, along_n = major_a(a) is Major.MN, major_b(b) is Major.MN
    strip = strip_bytes(columns_out(config.block_n, activation) * d.itemsize)
    part_m = config.block_m // config.cluster_n
    trims = groups.gemm_type == GemmType.DENSE and not along_m
    box_m = box_rows(m, config.block_m, part_m) if trims else part_m
    maps = (
        _operand(
            a.mT if along_m else a, along_m, config.block_m if along_m else box_m * config.cluster_n, config.cluster_n
        ),
        halves_map(b.mT, config.block_n // config.cluster_m)
        if halves
        else _operand(b if along_n else b.mT, along_n, config.block_n, config.cluster_m),
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
        kAddend=0 if addend is None else 2 if in_pairs(addend) else 1,
        Element=a.dtype,
        Out=d.dtype,
        Bias=d.dtype if bias is None else bias.dtype,
        Addend=d.dtype if addend is None else addend.dtype,
        kGemmType=int(groups.gemm_type),
        kAccumulate=accumulate,
        kSplitK=config.split,
        kTrim=box_m < part_m,
        kPrefetch=groups.gemm_type == GemmType.DENSE and m <= FEW_ROWS,
        kHalves=halves,
    )
    # Without the TMA: rows where a group ends, columns that a block of a split owns
    stores_rows = groups.gemm_type == GemmType.GROUPED_M or config.split > 1
    kernel_args = Args(
        *maps,
        bias=bias,
        c=addend,
        scale=scale,
        alpha=alpha,
        c_pitch=0 if addend is None else addend.stride(1),
        c_batch=0 if addend is None else addend.stride(0),
        d=d if stores_rows else None,
        d_pitch=d.stride(1) if stores_rows else 0,
        d_batch=d.stride(0) if stores_rows else 0,
        starts=groups.starts,
        ends=groups.ends,
        masked=groups.masked,
        m=m,
        n=n,
        k=k,
        batches=batches,
        group_m=config.group_m,
        box_m=box_m,
    )
    cluster = config.cluster_m * config.cluster_n * config.split
    units = -(-m // (config.block_m * config.cluster_m)) * -(-n // (config.block_n * config.cluster_n)) * batches
    blocks = max(1, min(units, resident(cluster, 1, usable_sms(d.device)))) * cluster
    KERNEL(
        (blocks,),
        kernel_args,
        params,
        block=128 * (1 + math_warpgroups(config.block_m)),
        shared_bytes=config.stages * stage_bytes(config.block_m, config.block_n, along_n)
        + staging_bytes(config.block_m, config.split),
        cluster=(cluster, 1, 1) if cluster > 1 else None,
    )


def _operand(operand: Tensor, mn_major: bool, block: int, shared: int) -> TensorMap | None:
    """Returns the map of an operand whose last dimension is contiguous, for one of `shared` blocks that share a tile.

    operand: (B, M or N, K); with mn_major (B, K, M or N), loaded in boxes of 64 columns.
    """
    return tensor_map(operand, (1, (_BLOCK_K if mn_major else block) // shared, 64), swizzle=_SPAN)


def halves_map(weights: Tensor, rows: int) -> TensorMap | None:
    """Returns the map of weights (G, N, K) in boxes of `rows`, half of them of the first half of N, half of the second.

    The map is (rows of all groups, 2, K): its second dimension steps by half of N.
    """
    groups, n, depth = weights.shape
    pitch = weights.stride(1)
    view = weights.as_strided((groups * n - n // 2, 2, depth), (pitch, n // 2 * pitch, 1))
    return tensor_map(view, (rows // 2, 2, 64), swizzle=_SPAN)


def math_warpgroups(block_m: int) -> int:
    """Returns the number of math warpgroups."""
    return 1 if block_m == 64 else 2


def box_rows(m: int, block_m: int, part_m: int) -> int:
    """Returns the rows of A in a box, of the `part_m` that a block loads: fewer if the last tile has fewer, and if
    there are few tiles.  Rows of a box that lie outside of A cost more than those inside: a k block of tiles of 64 x 64
    took 0.20 us instead of 0.12 where half of every second box was outside (M = 96, H200, November 2026).  Many small
    boxes cost too: e4m3 333 x 2560 x 2560 takes 11.0 us with boxes of 16, 8.6 of 32, 8.7 of 64.
    """
    if m % block_m == 0 or m > FEW_ROWS:
        return part_m
    if m <= part_m:
        return m
    common = gcd(m, part_m)
    return max(common, next(rows for rows in _BOX_ROWS if part_m % rows == 0))


def staging_bytes(block_m: int, split: int) -> int:
    """Returns bytes of D that a block stages: none if K is split, as parcels lie in the ring."""
    return math_warpgroups(block_m) * STAGING if split == 1 else 0


def check_split(split: int, k_blocks: int) -> None:
    """Raises InputError if a block of a cluster would have no k block."""
    if split > max(1, k_blocks):
        raise InputError(
            f"split={split} leaves blocks without work: K has {k_blocks} steps of 128 bytes; take a split of at most "
            "that, as `candidates` does"
        )


def stage_bytes(block_m: int, block_n: int, mn_major_b: bool) -> int:
    """Returns the bytes of A and B in a stage; a B that is contiguous along N fills boxes of 64 columns."""
    return (block_m + (-(-block_n // 64) * 64 if mn_major_b else block_n)) * _SPAN
