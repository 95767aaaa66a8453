"""Products of experts that have a few hundred rows each, in any number, for Hopper: the launch of `expert_rows.cuh`.

128 experts with 256 rows on average, give or take 16, have 256 flops for each byte of their weights: weights must be
read once, at 3.0 TB/s that alone is 760 TFLOP/s.  Tiles of 128 rows read the weights of half of the experts three times
and compute 320 rows for 257.  A tile here has all rows of an expert, and the weights are the operand of fixed height.
7168 x 2048, 32768 rows, gated: 3.12 ms on an H200, where a dense product of as many flops takes 2.82 (2026-11).
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.compilers.kernel_args import I32, I64, Map, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tensor_map import TensorMap, tensor_map
from tilewright.ops.gemm.grouped.args import GroupedArgs
from tilewright.ops.gemm.operands import ACTIVATIONS, Major, major_b

# As in the header: columns of a tile, rows of a copy, bytes and K of a stage
_COLUMNS, _BOX, _SPAN, _STEP = 128, 32, 128, 64
_SHARED = 232448  # bytes that a block may have
_STATIC = 2048  # of them, barriers and the table of tiles
ROOMS = (128, 192, 256, 288)
"""Rows that a tile may have room for."""


class Params(NamedTuple):
    """The compile-time constants of sm90_expert_rows."""

    kBlockM: int
    kStages: int
    kMajorW: int
    kGated: bool
    kActivation: int
    kOnce: bool
    Element: torch.dtype
    kBlockN: int = _COLUMNS
    kClusterM: int = 1
    kClusterN: int = 1
    kSplitK: int = 1
    kGemmType: int = 1  # groups of rows
    kAccumulate: bool = False


class Args(NamedTuple):
    """The parameters of sm90_expert_rows."""

    map_w: Map
    map_a: Map
    d: Pointer
    d_pitch: I64
    starts: Pointer
    ends: Pointer
    m: I32
    n: I32
    k: I32
    experts: I32


KERNEL = CudaKernel(
    Path(__file__).with_name("expert_rows.cuh"), "sm90_expert_rows", Args, archs=("sm_90a",), dependent=True
)


def stages(room: int) -> int:
    """Returns how many stages fit, beside a box of D for each warpgroup."""
    return min(6, (_SHARED - _STATIC - 2 * 64 * _SPAN) // ((_COLUMNS + room) * _SPAN))


def gemm_rows(d: Tensor, args: GroupedArgs, room: int, *, once: bool = True) -> None:
    """Rows of each group of d (1, S, N_out) = those of a (1, S, K) @ b (G, K, N) of the group, gated if "swiglu": then
    the first half of N has the gates, and b is contiguous along K.

    room: of `ROOMS`, rows of a tile; a group with more has several tiles.   once: whether a group seldom has more.
    """
    a, b, *_, starts, ends, _, activation, _ = args
    if not d.numel():
        return
    (_, m, k), (experts, _, n) = a.shape, b.shape
    gated = activation == "swiglu"
    along_n = major_b(b) is Major.MN
    params = Params(
        kBlockM=room,
        kStages=stages(room),
        kMajorW=int(along_n),
        kGated=gated,
        kActivation=ACTIVATIONS.index(activation),
        kOnce=once,
        Element=a.dtype,
    )
    kernel_args = Args(
        map_w=_weights_map(b, gated, along_n),
        map_a=tensor_map(a, (1, _BOX, _STEP), swizzle=_SPAN),
        d=d,
        d_pitch=d.stride(1),
        starts=starts,
        ends=ends,
        m=m,
        n=n,
        k=k,
        experts=experts,
    )
    KERNEL(
        (usable_sms(d.device),),  # the host does not know how many tiles there are; blocks share the last
        kernel_args,
        params,
        block=384,
        shared_bytes=params.kStages * (_COLUMNS + room) * _SPAN + 2 * 64 * _SPAN,
    )


def _weights_map(b: Tensor, gated: bool, along_n: bool) -> TensorMap | None:
    """Returns the map of weights b (G, K, N) in boxes of 128 columns, or of two of 64 where b is contiguous along N.

    gated: eight columns of the first half of N and eight of the second in turn; the map is (G, I / 8, 2, 8, K).
    """
    if along_n:
        return tensor_map(b, (1, _STEP, 64), swizzle=_SPAN)
    weights = b.mT
    if not gated:
        return tensor_map(weights, (1, _COLUMNS, _STEP), swizzle=_SPAN)
    experts, n, k = weights.shape
    each, pitch, _ = weights.stride()
    view = weights.as_strided((experts, n // 16, 2, 8, k), (each, 8 * pitch, n // 2 * pitch, pitch, 1))
    return tensor_map(view, (1, _COLUMNS // 16, 2, 8, _STEP), swizzle=_SPAN)
