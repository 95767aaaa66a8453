"""Attention backward in CUDA C++ for Hopper: one kernel for dq, dk and dv, 10 * B * H * pairs * D flops of products.

`backward.cuh` iterates over the query tiles of each key tile, and adds dq in float32 in global memory, in an
order that does not change from run to run.  A preprocess kernel before it computes lse and delta of each query and
clears the flags of that order; a postprocess kernel scales and rounds dq.  The mask is a band (causal, a window, none)
or packed sequences, for which one more kernel finds the queries that see each key.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.hardware.device import device_info
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tape import scratch
from tilewright.jit.tensor_map import tensor_map
from tilewright.ops.attention.band import clamped_band
from tilewright.ops.attention.kernels.triton.delta import delta, sink_gradient

_SWIZZLE, _WARPGROUP_M, _KEYS, _WARPGROUPS = 128, 64, 128, 2  # as in fmha_backward/shape.cuh
_BOX_COLUMNS = _SWIZZLE // 2  # elements of 16 bits
_MAX_D = 128
_L2_BYTES = 32 << 20  # for Q, dO and dq_acc of a section of heads, which the blocks of other keys use again
_THREADS, _INTERVALS_THREADS = 256, 128  # of the kernels before and after


class Config(NamedTuple):
    """block_m: queries of a tile.  stages: of Q and dO.  ds_stages: of dS, which the warpgroups share.  out_stages: of
    results on their way to global memory.
    """

    block_m: int
    stages: int
    ds_stages: int
    out_stages: int


class Params(NamedTuple):
    """What sm90_fmha_backward is compiled for."""

    kD: int
    kDv: int
    kBlockM: int
    kStages: int
    kDsStages: int
    kOutStages: int
    kSoftcap: bool
    kSlope: bool
    kPacked: bool
    Element: torch.dtype


class PreprocessParams(NamedTuple):
    """What sm90_fmha_preprocess is compiled for."""

    kBlockM: int
    kPacked: bool
    Element: torch.dtype


class IntervalsParams(NamedTuple):
    """What sm90_fmha_intervals is compiled for: it has no parameters."""


_FOLDER = Path(__file__).parent
KERNEL = CudaKernel(
    _FOLDER / "backward.cuh",
    "sm90_fmha_backward",
    "TTTTTTTPPPiiiiiiii?ffP",
    archs=("sm_90a",),
    dependent=True,
)
PREPROCESS = CudaKernel(
    _FOLDER / "preprocess.cuh", "sm90_fmha_preprocess", "PPPPPPiiiqqqqqqPi", archs=("sm_90a",), dependent=True
)
POSTPROCESS = CudaKernel(
    _FOLDER / "postprocess.cuh", "sm90_fmha_postprocess", "PPiiiiiifqqqP", archs=("sm_90a",), dependent=True
)
INTERVALS = CudaKernel(_FOLDER / "preprocess.cuh", "sm90_fmha_intervals", "PPii", archs=("sm_90a",), dependent=True)


def backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dsinks: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    mask_data: Tensor | None,
    program: str,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    config: Config,
) -> None:
    """dq, dk, dv and dsinks as the raw op `_fmha_bwd` describes them; S_k > 0.

    left, right: the band, -1 unlimited; program: "" (a band), or PACKED_PROGRAM.  See `fmha/raw.py`.
    """
    batch, heads, s_q, d = q.shape
    s_k, d_v = v.shape[2:]
    heads_per_kv = heads // k.shape[1]
    left, right = clamped_band(left, right, s_q, s_k)
    params = _params(d, d_v, softcap > 0, slopes is not None, bool(program), q.dtype, config)
    tiles = batch * heads * -(-s_q // config.block_m)
    stats = scratch((tiles, 2 * config.block_m), torch.float32, q.device)
    dq_acc = scratch((tiles, config.block_m, _columns(params)), torch.float32, q.device)
    flags = scratch((tiles + 1,), torch.int32, q.device)
    intervals = _intervals(mask_data, s_q, s_k, config) if program else 0
    PREPROCESS(
        (tiles,),
        (
            *(do, o, lse, 0 if dlse is None else dlse, stats, flags),
            *(s_q, d_v, heads),
            *do.stride()[:3],
            *o.stride()[:3],
            *(intervals, s_k),
        ),
        PreprocessParams(config.block_m, bool(program), q.dtype),
        block=_THREADS,
    )
    q_box, kv_box, dkv_box = ((1, 1, rows, _BOX_COLUMNS) for rows in (config.block_m, _KEYS, _WARPGROUP_M))
    boxes = ((q, q_box), (k, kv_box), (v, kv_box), (do, q_box), (dk, dkv_box), (dv, dkv_box))
    head_bytes = s_q * heads_per_kv * ((d + d_v) * q.itemsize + d * dq_acc.itemsize)
    kv_heads, key_tiles, sms = batch * k.shape[1], -(-s_k // _KEYS), usable_sms(q.device)
    section_heads = max(_L2_BYTES // head_bytes, -(-sms // key_tiles))  # a section fills the GPU
    KERNEL(
        (min(key_tiles * kv_heads, sms),),
        (
            *(tensor_map(t, box, swizzle=_SWIZZLE) for t, box in boxes),
            tensor_map(stats, (1, 2 * config.block_m), swizzle=0),
            *(dq_acc, flags, 0 if slopes is None else slopes),
            *(s_q, s_k, heads, batch, heads_per_kv, left, right, min(kv_heads, section_heads)),
            (left < 0) != (right < 0),  # alternate: key tiles differ in work
            scale,
            softcap,
            intervals,
        ),
        params,
        block=128 * (_WARPGROUPS + 1),
        shared_bytes=shared_bytes(params),
    )
    POSTPROCESS(
        (tiles,),
        (dq_acc, dq, s_q, s_k, d, heads, left, right, scale, *dq.stride()[:3], intervals),
        params,
        block=_THREADS,
    )
    if sinks is not None:
        row_delta = scratch(tuple(lse.shape), torch.float32, lse.device)
        delta(row_delta, do, o, dlse)
        sink_gradient(dsinks, row_delta, lse, sinks)


def _intervals(mask_data: Tensor | None, s_q: int, s_k: int, config: Config) -> Tensor:
    """(S_k + query tiles, 2) int32: the queries that see each key; sm90_fmha_preprocess fills the rest."""
    assert mask_data is not None, "a program has numbers"
    intervals = scratch((s_k + -(-s_q // config.block_m), 2), torch.int32, mask_data.device)
    INTERVALS(
        (-(-s_k // _INTERVALS_THREADS),), (mask_data, intervals, s_q, s_k), IntervalsParams(), block=_INTERVALS_THREADS
    )
    return intervals


def why_not(q: Tensor, v: Tensor) -> str | None:
    """Why this engine cannot run over these operands, or None if it can."""
    arch, d, d_v = device_info(q.device).arch, q.shape[3], v.shape[3]
    if arch != "sm_90":
        return f"is written for Hopper's tensor cores (sm_90), and this is {arch}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bf16 or fp16, got {q.dtype}"
    if max(d, d_v) > _MAX_D or d % 8 or d_v % 8:
        return f"has head dimensions up to {_MAX_D} that are multiples of 8, got D={d}, D_v={d_v}"
    return None


def shared_bytes(params: Params) -> int:
    """Shared memory of K and V, the stages of Q, dO, lse and delta, dS, and the results."""
    m, boxes, boxes_v = params.kBlockM, -(-params.kD // _BOX_COLUMNS), -(-params.kDv // _BOX_COLUMNS)
    ring = params.kStages * ((boxes + boxes_v) * m * _SWIZZLE + 8 * m)
    out = max(m // _WARPGROUPS * _columns(params) * 4, max(boxes, boxes_v) * _WARPGROUP_M * _SWIZZLE)
    keys, ds = (boxes + boxes_v) * _KEYS * _SWIZZLE, params.kDsStages * _KEYS * m * 2
    return keys + ring + ds + params.kOutStages * _WARPGROUPS * out


def _columns(params: Params) -> int:
    """Columns of dq_acc: D if the warpgroups divide dQ by rows, else D rounded up to one or two boxes."""
    if params.kBlockM == _KEYS:
        return params.kD
    return _BOX_COLUMNS if params.kD <= _BOX_COLUMNS else _WARPGROUPS * _BOX_COLUMNS


def _params(d: int, d_v: int, softcap: bool, slope: bool, packed: bool, dtype: torch.dtype, config: Config) -> Params:
    return Params(
        kD=-(-d // 16) * 16,
        kDv=-(-d_v // 16) * 16,
        kBlockM=config.block_m,
        kStages=config.stages,
        kDsStages=config.ds_stages,
        kOutStages=config.out_stages,
        kSoftcap=softcap,
        kSlope=slope,
        kPacked=packed,
        Element=dtype,
    )


# ------------------------------------------------------------------------------------------------------- what to choose

_WIDE_TILES = (Config(64, 2, 2, 2),)
_NARROW_TILES = (Config(128, 2, 2, 2), Config(64, 3, 2, 2))
_NARROW_SOFTCAP = (Config(64, 3, 2, 2),)  # 128 queries leave no registers for the derivative of the softcap


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """The tile for a bucket of `fmha/raw.py`."""
    return candidates(bucket, dtype)[0]


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Tiles that fit registers and shared memory at these head dimensions."""
    if max(bucket[4:6]) > _BOX_COLUMNS:
        return _WIDE_TILES
    return _NARROW_SOFTCAP if bucket[7] & 1 else _NARROW_TILES


CONFIGS: tuple[Config, ...] = (*_WIDE_TILES, *_NARROW_TILES)
"""Every config that `configure` and `candidates` can return."""
