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
from tilewright.jit.compilers.kernel_args import Map
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tape import scratch
from tilewright.jit.tensor_map import tensor_map
from tilewright.mask.program import leaves
from tilewright.ops.attention import fmha, fmha_varlen
from tilewright.ops.attention.arguments import FmhaBackwardArgs
from tilewright.ops.attention.bucket import SOFTCAP, FmhaBucket, backward_bucket, why_not_addressable, why_not_interval
from tilewright.ops.attention.kernels.sm90 import backward_schedule as divisions
from tilewright.ops.attention.kernels.sm90.backward_args import (
    Args,
    IntervalsArgs,
    IntervalsParams,
    Params,
    PartsArgs,
    PostprocessArgs,
    PreprocessArgs,
    PreprocessParams,
    SumArgs,
    SumParams,
)
from tilewright.ops.attention.kernels.sm90.backward_schedule import KEYS
from tilewright.ops.attention.kernels.triton.delta import delta, sink_gradient

_SWIZZLE, WARPGROUP_M, _WARPGROUPS = 128, 64, 2  # as in fmha_backward/shape.cuh
BOX_COLUMNS = _SWIZZLE // 2  # elements of 16 bits
_MAX_D = 128
THREADS = 128 * (_WARPGROUPS + 1)
POINTWISE_THREADS, _INTERVALS_THREADS = 256, 128  # of the kernels before and after


class Config(NamedTuple):
    """block_m: queries of a tile.  stages: of Q and dO.  ds_stages: of dS, which the warpgroups share.  out_stages: of
    results on their way to global memory.
    """

    block_m: int
    stages: int
    ds_stages: int
    out_stages: int


_FOLDER, _ARCHS = Path(__file__).parent, ("sm_90a",)
KERNEL = CudaKernel(_FOLDER / "backward.cuh", "sm90_fmha_backward", Args, archs=_ARCHS, dependent=True)
PREPROCESS = CudaKernel(
    _FOLDER / "preprocess.cuh", "sm90_fmha_preprocess", PreprocessArgs, archs=_ARCHS, dependent=True
)
POSTPROCESS = CudaKernel(
    _FOLDER / "postprocess.cuh", "sm90_fmha_postprocess", PostprocessArgs, archs=_ARCHS, dependent=True
)
KERNEL_PARTS = CudaKernel(_FOLDER / "backward.cuh", "sm90_fmha_backward_parts", PartsArgs, archs=_ARCHS, dependent=True)
SUM_PARTS = CudaKernel(_FOLDER / "postprocess.cuh", "sm90_fmha_sum_parts", SumArgs, archs=_ARCHS, dependent=True)
INTERVALS = CudaKernel(_FOLDER / "preprocess.cuh", "sm90_fmha_intervals", IntervalsArgs, archs=_ARCHS, dependent=True)


class Shared(NamedTuple):
    """Memory that the kernels of one backward pass on, and the band that they agree on."""

    stats: Tensor  # (query tiles, 2 * block_m) float32: lse and delta of each row
    dq_acc: Tensor  # (query tiles, block_m, columns) float32
    flags: Tensor  # (query tiles + 1,) int32: how many key tiles have added to dq_acc
    intervals: Tensor | None  # (B or 1, S_k + query tiles, 2): the queries that see each key, of packed sequences
    band: tuple[int, int]  # left, right


def backward(outs: tuple[Tensor, Tensor, Tensor, Tensor], args: FmhaBackwardArgs, config: Config) -> None:
    """Write dq, dk, dv and dsinks; S_k > 0.  The mask is a band or packed sequences."""
    dq, dk, dv, dsinks = outs
    lse, (batch, heads, s_q, _) = args.lse, args.q.shape
    params, tiles = _params(args, config), batch * heads * -(-s_q // config.block_m)
    shared = preprocess(args, tiles, params)
    _products((dk, dv), args, shared, params)
    _postprocess(dq, args, shared, tiles, params)
    if args.sinks is not None:
        row_delta = scratch(tuple(lse.shape), torch.float32, lse.device)
        delta(row_delta, args.do, args.o, args.dlse)
        sink_gradient(dsinks, row_delta, lse, args.sinks)


def preprocess(args: FmhaBackwardArgs, tiles: int, params: Params) -> Shared:
    """Write lse and delta of each row, and clear the flags.   tiles: of queries, over batch and heads."""
    device, block_m = args.q.device, params.kBlockM
    sizes = args.q.shape[2], args.k.shape[2]
    shared = Shared(
        scratch((tiles, 2 * block_m), torch.float32, device),
        scratch((tiles, block_m, _columns(params)), torch.float32, device),
        scratch((tiles + 1,), torch.int32, device),
        _intervals(args, block_m) if args.program else None,
        args.mask.clamped_band(*sizes),
    )
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
        PreprocessParams(block_m, params.kPacked, params.kByBatch, args.q.dtype),
        block=POINTWISE_THREADS,
    )
    return shared


def _products(dkv: tuple[Tensor, Tensor], args: FmhaBackwardArgs, shared: Shared, params: Params) -> None:
    """Write dk and dv, and add up dq in float32."""
    q, k, v = args.q, args.k, args.v
    (batch, heads, s_q, d), (kv_heads, s_k, d_v) = q.shape, v.shape[1:]
    all_heads, group, (left, right) = batch * kv_heads, heads // kv_heads, shared.band
    sms = usable_sms(q.device)
    if args.program:
        parts = divisions.parts_of_packed(all_heads, group, s_k, sms)
    else:
        parts = divisions.parts(all_heads, group, (s_q, s_k), shared.band, (d, d_v), sms)
    results = dkv
    if parts > 1:
        shape = batch, kv_heads * parts, s_k
        results = scratch((*shape, d), q.dtype, q.device), scratch((*shape, d_v), q.dtype, q.device)
    heads_per_kv = group // parts
    tensors = {"q": (q, params.kBlockM), "k": (k, KEYS), "v": (v, KEYS), "do": (args.do, params.kBlockM)}
    tensors |= {"dk": (results[0], WARPGROUP_M), "dv": (results[1], WARPGROUP_M)}
    grid, section_heads = divisions.schedule(all_heads * parts, s_k, s_q * heads_per_kv * (d * 6 + d_v * 2), q.device)
    arguments = Args(
        **maps(tensors, shared, params),
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
        section_heads=section_heads,
        alternate=divisions.differ_in_work(shared.band),
        scale=args.scale,
        softcap=args.softcap,
        intervals=shared.intervals,
    )
    shared_size = shared_bytes(params)
    if parts == 1:
        KERNEL((grid,), arguments, params, block=THREADS, shared_bytes=shared_size)
    else:
        KERNEL_PARTS((grid,), PartsArgs(*arguments, parts=parts), params, block=THREADS, shared_bytes=shared_size)
        _sum_parts(dkv, results, parts)


def _sum_parts(dkv: tuple[Tensor, Tensor], results: tuple[Tensor, Tensor], parts: int) -> None:
    """Add up dk and dv of the parts of each kv head."""
    (dk, dv), (dk_parts, dv_parts) = dkv, results
    (batch, kv_heads, s_k, d), d_v = dk.shape, dv.shape[3]
    (dk_batch, dk_head, dk_row, _), (dv_batch, dv_head, dv_row, _) = dk.stride(), dv.stride()
    SUM_PARTS(
        (-(-batch * kv_heads * s_k * max(d, d_v) // (8 * POINTWISE_THREADS)), 2),
        SumArgs(
            dk_parts=dk_parts,
            dv_parts=dv_parts,
            dk=dk,
            dv=dv,
            kv_heads=kv_heads,
            all_heads=batch * kv_heads,
            s_k=s_k,
            d=d,
            d_v=d_v,
            parts=parts,
            dk_batch=dk_batch,
            dk_head=dk_head,
            dk_row=dk_row,
            dv_batch=dv_batch,
            dv_head=dv_head,
            dv_row=dv_row,
        ),
        SumParams(dk.dtype),
        block=POINTWISE_THREADS,
    )


def maps(tensors: dict[str, tuple[Tensor, int]], shared: Shared, params: Params) -> dict[str, Map]:
    """Tensor maps by name, each with boxes of so many rows, and that of lse and delta."""
    descriptors = {
        f"map_{name}": tensor_map(t, (1, 1, rows, BOX_COLUMNS), swizzle=_SWIZZLE) for name, (t, rows) in tensors.items()
    }
    return descriptors | {"map_stats": tensor_map(shared.stats, (1, 2 * params.kBlockM), swizzle=0)}


def _postprocess(dq: Tensor, args: FmhaBackwardArgs, shared: Shared, tiles: int, params: Params) -> None:
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
        block=POINTWISE_THREADS,
    )


def _intervals(args: FmhaBackwardArgs, block_m: int) -> Tensor:
    """(B or 1, S_k + query tiles, 2) int32: the queries that see each key; sm90_fmha_preprocess fills the rest."""
    assert args.mask_data is not None, "a program has numbers"
    s_q, s_k = args.q.shape[2], args.k.shape[2]
    rows, stride = args.q.shape[0] if by_batch(args.program) else 1, s_k + -(-s_q // block_m)
    intervals = scratch((rows, stride, 2), torch.int32, args.mask_data.device)
    INTERVALS(
        (-(-s_k // _INTERVALS_THREADS), rows),
        IntervalsArgs(args.mask_data, intervals, s_q, s_k, stride),
        IntervalsParams(),
        block=_INTERVALS_THREADS,
    )
    return intervals


def by_batch(program: str) -> bool:
    """Whether each row of the batch has its own sequences."""
    return any(leaf.by_batch for leaf in leaves(program))


def why_not_operands(q: Tensor, v: Tensor) -> str | None:
    """Why this kernel cannot run over these operands, or None if it can."""
    d, d_v = q.shape[3], v.shape[3]
    if max(d, d_v) > _MAX_D or d % 8 or d_v % 8:
        return f"has head dimensions up to {_MAX_D} that are multiples of 8, got D={d}, D_v={d_v}"
    return why_not_device(q)


def why_not_device(q: Tensor) -> str | None:
    """Why this kernel cannot run on the device and dtype of q, or None if it can."""
    arch = device_info(q.device).arch
    if arch != "sm_90":
        return f"is written for Hopper's tensor cores (sm_90), and this is {arch}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bf16 or fp16, got {q.dtype}"
    return None


def shared_bytes(params: Params) -> int:
    """Shared memory of K and V, the stages of Q, dO, lse and delta, dS, and the results."""
    m, boxes, boxes_v = params.kBlockM, -(-params.kD // BOX_COLUMNS), -(-params.kDv // BOX_COLUMNS)
    ring = params.kStages * ((boxes + boxes_v) * m * _SWIZZLE + 8 * m)
    out = max(m // _WARPGROUPS * _columns(params) * 4, max(boxes, boxes_v) * WARPGROUP_M * _SWIZZLE)
    keys, ds = (boxes + boxes_v) * KEYS * _SWIZZLE, params.kDsStages * KEYS * m * 2
    return keys + ring + ds + params.kOutStages * _WARPGROUPS * out


def _columns(params: Params) -> int:
    """Columns of dq_acc: D if the warpgroups divide dQ by rows, else D rounded up to whole boxes."""
    return params.kD if params.kBlockM == KEYS else -(-params.kD // BOX_COLUMNS) * BOX_COLUMNS


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
        kByBatch=by_batch(args.program),
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
    if max(bucket.D, bucket.D_v) > BOX_COLUMNS:
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
