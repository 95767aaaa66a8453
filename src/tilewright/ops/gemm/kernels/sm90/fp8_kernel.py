"""The launch of `fp8.cuh`: e4m3 operands with scales, every 128 of K promoted to float32.

A tile of 192x128 takes 192 * 128 * 128 * 2 flops for each 40 KB that its SM loads, and promotes 192 * 128 results with
one FMA each, on the CUDA cores, while the tensor cores go on.  So 4096x7168x16384 cannot beat 0.49 ms at 1979 TFLOP/s.
fp8.cuh describes how promotion is hidden.  Operands are contiguous along K: WGMMA reads 8-bit elements no other way.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.collect import collecting
from tilewright.jit.compilers.kernel_args import F32, I32, I64, Map, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tensor_map import tensor_map
from tilewright.ops.gemm.kernels.sm90.cost_model import strip_bytes
from tilewright.ops.gemm.kernels.sm90.dense_kernel import FEW_ROWS, NO_GROUPS, GemmType, Groups, box_rows, check_split
from tilewright.ops.gemm.kernels.sm90.few_rows_model import resident
from tilewright.ops.gemm.kernels.sm90.operands import adds_in_place, in_pairs
from tilewright.ops.gemm.operands import ACTIVATIONS, FP8, columns_out
from tilewright.ops.gemm.scaled.args import ScaledMatmulArgs
from tilewright.ops.gemm.scaled.scaling import Scaling, scaling_of

_SPAN = 128  # bytes and elements of K in a stage
_BOX = 64 * _SPAN  # bytes of a box of 64 rows of D
_MAX_BUFFERS = 4  # boxes that a warpgroup stages
_MAX_BOX_ROWS = 256  # of one TMA box
_BLOCKS = 3  # 128-column blocks that a tile may touch
_SCALE_PAD = 4  # rows of scales before a tile: TMA boxes begin at multiples of 16 bytes


class Config(NamedTuple):
    """block_m x block_n of D for a block; stages of the ring; group_m: rows of tiles in a group of the tile order;
    cluster_m or cluster_n: two blocks that share an operand; split: parts of K, as in `dense_kernel.Config`.
    """

    block_m: int
    block_n: int
    stages: int
    group_m: int
    cluster_m: int = 1
    cluster_n: int = 1
    split: int = 1


class Params(NamedTuple):
    """The compile-time constants of sm90_fp8_gemm."""

    kBlockM: int
    kBlockN: int
    kStages: int
    kScaling: int
    kGemmType: int
    kActivation: int
    kBias: bool
    kAddend: int
    kAccumulate: bool
    Element: torch.dtype
    Out: torch.dtype
    Bias: torch.dtype
    Addend: torch.dtype
    kClusterM: int = 1
    kClusterN: int = 1
    kSplitK: int = 1
    kTrim: bool = False
    kPrefetch: bool = False


class Args(NamedTuple):
    """The parameters of sm90_fp8_gemm."""

    map_a: Map
    map_b: Map
    map_d: Map
    map_scale_a: Map
    map_scale_b: Map
    scale_a: Pointer
    scale_a_batch: I64
    scale_b: Pointer
    scale_b_pitch: I64
    scale_b_batch: I64
    bias: Pointer
    c: Pointer
    alpha: F32
    c_pitch: I64
    c_batch: I64
    direct: Pointer
    direct_pitch: I64
    direct_batch: I64
    starts: Pointer
    ends: Pointer
    masked: bool
    m: I32
    n: I32
    k: I32
    batches: I32
    group_m: I32
    box_m: I32


KERNEL = CudaKernel(Path(__file__).with_name("fp8.cuh"), "sm90_fp8_gemm", Args, archs=("sm_90a",), dependent=True)


class _Direct(NamedTuple):
    """What the kernel stores without a tensor map: rows of D where a group ends, or the scales of an e4m3 result."""

    pointer: Tensor | None = None
    pitch: int = 0
    batch: int = 0


def gemm(d: Tensor, args: ScaledMatmulArgs, config: Config, groups: Groups = NO_GROUPS) -> None:
    """d = act(alpha * (a * scale_a) @ (b * scale_b) + bias) + c.

    d: (B, M, N_out); a: (B, M, K); b: (B, K, N); scale_a: (B, M blocks, K blocks); scale_b: (B, N blocks, K blocks);
    c: (B, M, N_out), may be d.  `groups` as in `dense_kernel.gemm`.
    """
    c = args.c
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
    by_rows = groups.gemm_type == GemmType.GROUPED_M or config.split > 1
    direct = _Direct(d, d.stride(1), d.stride(0)) if by_rows else _Direct()
    _launch(d, direct, args._replace(c=None) if accumulate else args, config, groups, accumulate=accumulate)


def gemm_fp8(q: Tensor, scales: Tensor, args: ScaledMatmulArgs, config: Config) -> None:
    """q, scales = act(alpha * (a * scale_a) @ (b * scale_b) + bias) with q (B, M, N_out) e4m3 and scales
    (B, M, ceil(N_out / 128)), consecutive rows adjacent in memory.
    """
    _launch(q, _Direct(scales, scales.stride(2), scales.stride(0)), args, config, NO_GROUPS)


def _launch(
    d: Tensor,
    direct: _Direct,
    args: ScaledMatmulArgs,
    config: Config,
    groups: Groups,
    *,
    accumulate: bool = False,
) -> None:
    """accumulate: add to d."""
    a, b, scale_a, scale_b, bias, addend, alpha, activation, _ = args
    check_split(config.split, -(-a.shape[2] // _SPAN))
    m, k = a.shape[1:]
    n = b.shape[-1]
    batches = groups.count or a.shape[0]
    scaling = scaling_of(a, b, scale_a, scale_b)
    strip = _SPAN if d.dtype == FP8 else strip_bytes(columns_out(config.block_n, activation) * d.itemsize)
    part_m = config.block_m // config.cluster_n
    box_m = box_rows(m, config.block_m, part_m) if groups.gemm_type == GemmType.DENSE else part_m
    operands = (
        tensor_map(a, (1, box_m, _SPAN), swizzle=_SPAN),
        tensor_map(b.mT, (1, config.block_n // config.cluster_m, _SPAN), swizzle=_SPAN),
    )
    by_token = scaling in (Scaling.TOKEN_BLOCK, Scaling.TOKEN_TOKEN), scaling == Scaling.TOKEN_TOKEN
    rows = _rows_per_copy(config.block_m) + (_SCALE_PAD if groups.gemm_type == GemmType.GROUPED_M else 0)
    maps = (
        *operands,
        tensor_map(d, (1, 64, strip // d.itemsize), swizzle=strip),
        tensor_map(scale_a.mT, (1, 1, rows)) if by_token[0] else operands[0],  # otherwise not read
        tensor_map(scale_b.mT, (1, 1, config.block_n)) if by_token[1] else operands[1],
    )
    params = Params(
        kBlockM=config.block_m,
        kBlockN=config.block_n,
        kStages=config.stages,
        kScaling=int(scaling),
        kGemmType=int(groups.gemm_type),
        kActivation=ACTIVATIONS.index(activation),
        kBias=bias is not None,
        kAddend=0 if addend is None else 2 if in_pairs(addend) else 1,
        kAccumulate=accumulate,
        Element=a.dtype,
        Out=d.dtype,
        Bias=torch.float32 if bias is None else bias.dtype,
        Addend=torch.float32 if addend is None else addend.dtype,
        kClusterM=config.cluster_m,
        kClusterN=config.cluster_n,
        kSplitK=config.split,
        kTrim=box_m < part_m,
        kPrefetch=groups.gemm_type == GemmType.DENSE and m <= FEW_ROWS,
    )
    kernel_args = Args(
        *maps,
        scale_a=scale_a,
        scale_a_batch=scale_a.stride(0),
        scale_b=scale_b,
        scale_b_pitch=scale_b.stride(1),
        scale_b_batch=scale_b.stride(0),
        bias=bias,
        c=addend,
        alpha=alpha,
        c_pitch=0 if addend is None else addend.stride(1),
        c_batch=0 if addend is None else addend.stride(0),
        direct=direct.pointer,
        direct_pitch=direct.pitch,
        direct_batch=direct.batch,
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
    clusters = resident(cluster, 1, usable_sms(d.device))
    units = -(-m // (config.block_m * config.cluster_m)) * -(-n // (config.block_n * config.cluster_n)) * batches
    blocks = (
        max(1, clusters if groups.gemm_type == GemmType.GROUPED_M else min(units, clusters)) * cluster
    )  # the host does not know group sizes
    KERNEL(
        (blocks,),
        kernel_args,
        params,
        block=128 * (1 + math_warpgroups(config.block_m)),
        shared_bytes=shared_bytes(config, scaling),
        cluster=(cluster, 1, 1) if cluster > 1 else None,
    )


def waves(block_m: int) -> int:
    """Returns how many times 64 rows a warpgroup multiplies."""
    return 2 if block_m > 192 else 1


def math_warpgroups(block_m: int) -> int:
    """Returns the number of math warpgroups."""
    return block_m // 64 // waves(block_m)


def shared_bytes(config: Config, scaling: int) -> int:
    """Returns bytes of the stages of A, B and scales, and of staging D: a bf16 tile, at most four boxes a warpgroup;
    none if K is split.
    """
    stage = (config.block_m + config.block_n) * _SPAN + _scale_bytes(config, scaling)
    boxes = min(_MAX_BUFFERS, waves(config.block_m) * -(-config.block_n // 64))
    staged = math_warpgroups(config.block_m) * boxes * _BOX if config.split == 1 else 0
    return config.stages * stage + staged


def _rows_per_copy(block_m: int) -> int:
    """Returns the rows whose scales one TMA box loads, without those before the tile."""
    return block_m // (2 if block_m + _SCALE_PAD > _MAX_BOX_ROWS else 1)


def _scale_bytes(config: Config, scaling: int) -> int:
    """Returns bytes of scales in a stage: of rows in one or two boxes, and of columns or blocks of columns."""
    if scaling not in (Scaling.TOKEN_BLOCK, Scaling.TOKEN_TOKEN):
        return 0
    rows = _rows_per_copy(config.block_m)
    columns = config.block_n if scaling == Scaling.TOKEN_TOKEN else _BLOCKS
    return config.block_m // rows * _scale_row_bytes(rows + _SCALE_PAD) + _scale_row_bytes(columns)


def _scale_row_bytes(floats: int) -> int:
    """Returns bytes rounded up to 128, where TMA boxes may begin."""
    return -(-4 * floats // 128) * 128
