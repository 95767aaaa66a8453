"""Attention backward in CUDA C++ for Hopper, of `fmha` and `fmha_varlen`: one kernel for dq, dk and dv, 10 * B * H *
pairs * D flops of products.

`backward.cuh` iterates over the query tiles of each key tile, and adds dq in float32 in global memory, in an
order that does not change from run to run.  A preprocess kernel before it computes lse and delta of each query and
clears the flags of that order; a postprocess kernel scales and rounds dq.  The mask is a band (causal, a window, none)
or packed sequences, for which one more kernel finds the queries that see each key.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.hardware.device import device_info
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.compilers.kernel_args import F32, I32, I64, Map, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tape import scratch
from tilewright.jit.tensor_map import tensor_map
from tilewright.mask.program import leaves
from tilewright.ops.attention import fmha, fmha_varlen
from tilewright.ops.attention.arguments import FmhaBackwardArgs
from tilewright.ops.attention.bucket import SOFTCAP, FmhaBucket, backward_bucket, why_not_addressable, why_not_interval
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
    kByBatch: bool
    Element: torch.dtype


class PreprocessParams(NamedTuple):
    """What sm90_fmha_preprocess is compiled for."""

    kBlockM: int
    kPacked: bool
    kByBatch: bool
    Element: torch.dtype


class IntervalsParams(NamedTuple):
    """What sm90_fmha_intervals is compiled for: it has no parameters."""


class Args(NamedTuple):
    map_q: Map
    map_k: Map
    map_v: Map
    map_do: Map
    map_dk: Map
    map_dv: Map
    map_stats: Map
    dq_acc: Pointer
    flags: Pointer
    slopes: Pointer
    s_q: I32
    s_k: I32
    heads: I32
    batches: I32
    heads_per_kv: I32
    left: I32
    right: I32
    section_heads: I32
    alternate: bool
    scale: F32
    softcap: F32
    intervals: Pointer


class PreprocessArgs(NamedTuple):
    d_o: Pointer
    o: Pointer
    lse: Pointer
    dlse: Pointer
    stats: Pointer
    flags: Pointer
    s_q: I32
    d_v: I32
    heads: I32
    do_batch: I64
    do_head: I64
    do_row: I64
    o_batch: I64
    o_head: I64
    o_row: I64
    intervals: Pointer
    s_k: I32


class PostprocessArgs(NamedTuple):
    dq_acc: Pointer
    dq: Pointer
    s_q: I32
    s_k: I32
    d: I32
    heads: I32
    left: I32
    right: I32
    scale: F32
    dq_batch: I64
    dq_head: I64
    dq_row: I64
    intervals: Pointer


class IntervalsArgs(NamedTuple):
    mask_data: Pointer
    intervals: Pointer
    s_q: I32
    s_k: I32
    batch_stride: I32


_FOLDER, _ARCHS = Path(__file__).parent, ("sm_90a",)
KERNEL = CudaKernel(_FOLDER / "backward.cuh", "sm90_fmha_backward", Args, archs=_ARCHS, dependent=True)
PREPROCESS = CudaKernel(
    _FOLDER / "preprocess.cuh", "sm90_fmha_preprocess", PreprocessArgs, archs=_ARCHS, dependent=True
)
POSTPROCESS = CudaKernel(
    _FOLDER / "postprocess.cuh", "sm90_fmha_postprocess", PostprocessArgs, archs=_ARCHS, dependent=True
)
INTERVALS = CudaKernel(_FOLDER / "preprocess.cuh", "sm90_fmha_intervals", IntervalsArgs, archs=_ARCHS, dependent=True)


class _Scratch(NamedTuple):
    """Memory that the kernels of one backward pass on, and the band that they agree on."""

    stats: Tensor  # (query tiles, 2 * block_m) float32: lse and delta of each row
    dq_acc: Tensor  # (query tiles, block_m, columns) float32
    flags: Tensor  # (query tiles + 1,) int32: how many key tiles have added to dq_acc
    intervals: Tensor | None  # (B or 1, S_k + query tiles, 2): the queries that see each key, of packed sequences
    band: tuple[int, int]  # left, right


def backward(outs: tuple[Tensor, Tensor, Tensor, Tensor], args: FmhaBackwardArgs, config: Config) -> None:
    """Write dq, dk, dv and dsinks; S_k > 0.  The mask is a band or packed sequences."""
    dq, dk, dv, dsinks = outs
    q, lse = args.q, args.lse
    batch, heads, s_q, _ = q.shape
    s_k = args.k.shape[2]
    params, tiles = _params(args, config), batch * heads * -(-s_q // config.block_m)
    shared = _Scratch(
        scratch((tiles, 2 * config.block_m), torch.float32, q.device),
        scratch((tiles, config.block_m, _columns(params)), torch.float32, q.device),
        scratch((tiles + 1,), torch.int32, q.device),
        _intervals(args, config) if args.program else None,
        args.mask.clamped_band(s_q, s_k),
    )
    _preprocess(args, shared, tiles, config)
    _products((dk, dv), args, shared, params)
    _postprocess(dq, args, shared, tiles, params)
    if args.sinks is not None:
        row_delta = scratch(tuple(lse.shape), torch.float32, lse.device)
        delta(row_delta, args.do, args.o, args.dlse)
        sink_gradient(dsinks, row_delta, lse, args.sinks)


def _preprocess(args: FmhaBackwardArgs, shared: _Scratch, tiles: int, config: Config) -> None:
    """Write lse and delta of each row, and clear the flags."""
    do_batch, do_head, do_row, _ = args.do.stride()
    o_batch, o_head, o_row, _ = args.o.stride()
    PREPROCESS(
        (tiles,),
        PreprocessArgs(
            d_o=args.do,
            o=args.o,
            lse=args.lse,
            dlse=args.dlse,
            stats=shared.stats,
            flags=shared.flags,
            s_q=args.q.shape[2],
            d_v=args.v.shape[3],
            heads=args.q.shape[1],
            do_batch=do_batch,
            do_head=do_head,
            do_row=do_row,
            o_batch=o_batch,
            o_head=o_head,
            o_row=o_row,
            intervals=shared.intervals,
            s_k=args.k.shape[2],
        ),
        PreprocessParams(config.block_m, bool(args.program), _by_batch(args), args.q.dtype),
        block=_THREADS,
    )


def _products(dkv: tuple[Tensor, Tensor], args: FmhaBackwardArgs, shared: _Scratch, params: Params) -> None:
    """Write dk and dv, and add up dq in float32."""
    q, k, v = args.q, args.k, args.v
    (batch, heads, s_q, d), (s_k, d_v) = q.shape, v.shape[2:]
    heads_per_kv, (left, right) = heads // k.shape[1], shared.band
    q_box, kv_box, dkv_box = ((1, 1, rows, _BOX_COLUMNS) for rows in (params.kBlockM, _KEYS, _WARPGROUP_M))
    boxes = {"q": (q, q_box), "k": (k, kv_box), "v": (v, kv_box), "do": (args.do, q_box)}
    boxes |= {"dk": (dkv[0], dkv_box), "dv": (dkv[1], dkv_box)}
    head_bytes = s_q * heads_per_kv * ((d + d_v) * q.itemsize + d * shared.dq_acc.itemsize)
    maps = {f"map_{name}": tensor_map(t, box, swizzle=_SWIZZLE) for name, (t, box) in boxes.items()}
    maps["map_stats"] = tensor_map(shared.stats, (1, 2 * params.kBlockM), swizzle=0)
    kv_heads, key_tiles, sms = batch * k.shape[1], -(-s_k // _KEYS), usable_sms(q.device)
    section_heads = max(_L2_BYTES // head_bytes, -(-sms // key_tiles))  # a section fills the GPU
    KERNEL(
        (min(key_tiles * kv_heads, sms),),
        Args(
            **maps,
            dq_acc=shared.dq_acc,
            flags=shared.flags,
            slopes=args.slopes,
            s_q=s_q,
            s_k=s_k,
            heads=heads,
            batches=batch,
            heads_per_kv=heads_per_kv,
            left=left,
            right=right,
            section_heads=min(kv_heads, section_heads),
            alternate=(left < 0) != (right < 0),  # key tiles differ in work
            scale=args.scale,
            softcap=args.softcap,
            intervals=shared.intervals,
        ),
        params,
        block=128 * (_WARPGROUPS + 1),
        shared_bytes=shared_bytes(params),
    )


def _postprocess(dq: Tensor, args: FmhaBackwardArgs, shared: _Scratch, tiles: int, params: Params) -> None:
    """Scale and round dq."""
    _, heads, s_q, d = args.q.shape
    (left, right), (dq_batch, dq_head, dq_row, _) = shared.band, dq.stride()
    POSTPROCESS(
        (tiles,),
        PostprocessArgs(
            dq_acc=shared.dq_acc,
            dq=dq,
            s_q=s_q,
            s_k=args.k.shape[2],
            d=d,
            heads=heads,
            left=left,
            right=right,
            scale=args.scale,
            dq_batch=dq_batch,
            dq_head=dq_head,
            dq_row=dq_row,
            intervals=shared.intervals,
        ),
        params,
        block=_THREADS,
    )


def _intervals(args: FmhaBackwardArgs, config: Config) -> Tensor:
    """(B or 1, S_k + query tiles, 2) int32: the queries that see each key; sm90_fmha_preprocess fills the rest."""
    assert args.mask_data is not None, "a program has numbers"
    s_q, s_k = args.q.shape[2], args.k.shape[2]
    rows, stride = args.q.shape[0] if _by_batch(args) else 1, s_k + -(-s_q // config.block_m)
    intervals = scratch((rows, stride, 2), torch.int32, args.mask_data.device)
    INTERVALS(
        (-(-s_k // _INTERVALS_THREADS), rows),
        IntervalsArgs(args.mask_data, intervals, s_q, s_k, stride),
        IntervalsParams(),
        block=_INTERVALS_THREADS,
    )
    return intervals


def _by_batch(args: FmhaBackwardArgs) -> bool:
    """Whether each row of the batch has its own sequences."""
    return any(leaf.by_batch for leaf in leaves(args.program))


def why_not_operands(q: Tensor, v: Tensor) -> str | None:
    """Why this kernel cannot run over these operands, or None if it can."""
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


def _params(args: FmhaBackwardArgs, config: Config) -> Params:
    return Params(
        kD=-(-args.q.shape[3] // 16) * 16,
        kDv=-(-args.v.shape[3] // 16) * 16,
        kBlockM=config.block_m,
        kStages=config.stages,
        kDsStages=config.ds_stages,
        kOutStages=config.out_stages,
        kSoftcap=args.softcap > 0,
        kSlope=args.slopes is not None,
        kPacked=bool(args.program),
        kByBatch=_by_batch(args),
        Element=args.q.dtype,
    )


# ------------------------------------------------------------------------------------------------------- what to choose

_WIDE_TILES = (Config(64, 2, 2, 2),)
_NARROW_TILES = (Config(128, 2, 2, 2), Config(64, 3, 2, 2))
_NARROW_SOFTCAP = (Config(64, 3, 2, 2),)  # 128 queries leave no registers for the derivative of the softcap


def configure(bucket: FmhaBucket, dtype: torch.dtype) -> Config:
    """The first candidate."""
    return candidates(bucket, dtype)[0]


def candidates(bucket: FmhaBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Tiles that fit registers and shared memory at these head dimensions."""
    if max(bucket.D, bucket.D_v) > _BOX_COLUMNS:
        return _WIDE_TILES
    return _NARROW_SOFTCAP if bucket.extras & SOFTCAP else _NARROW_TILES


CONFIGS: tuple[Config, ...] = (*_WIDE_TILES, *_NARROW_TILES)
"""Every config that `configure` and `candidates` can return."""


def why_not(args: FmhaBackwardArgs) -> str | None:
    bucket = backward_bucket(args)
    return why_not_interval(bucket) or why_not_addressable(bucket) or why_not_operands(args.q, args.v)


@register_kernel(
    fmha.BACKWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
@register_kernel(
    fmha_varlen.BACKWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=why_not,
)
def launch(outs: tuple[Tensor, Tensor, Tensor, Tensor], args: FmhaBackwardArgs, config: Config) -> None:
    backward(outs, args, config)
