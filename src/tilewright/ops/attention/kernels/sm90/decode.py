"""Attention over a KV cache in CUDA C++ for Hopper, of `fmha_decode` and of the decoding steps of `fmha_paged`.

Traffic: the visible keys and values once, as in the Triton kernels; what differs is how many bytes are in flight.
Eight warps load for themselves and hold 192 KB of each multiprocessor's shared memory in rings, and wait for one
another only where the keys of a row tile end.  `decode.cuh` says how.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.hardware.device import device_info
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.collect import collecting
from tilewright.jit.compilers.kernel_args import F32, I32, I64, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tape import scratch
from tilewright.ops.attention import fmha_decode, fmha_paged
from tilewright.ops.attention.kernels.sm90.decode_choice import (
    MOST_SUMS,
    WIDTHS,
    Config,
    Division,
    candidates,
    configs,
    configure,
    shared_bytes,
)
from tilewright.ops.attention.paged.args import TOKEN_SCALES, PagedArgs, bucket, cache_kind

MOST_SEQUENCES = 4096  # every warp adds up the keys of all of them
_MOST_SHARES = 32  # of a row tile, where only its own length may decide
_LEAST_OWN = 32  # units of such a share
_MOST_UNITS = 2**31  # counted in 32 bits
_COMBINE_THREADS = 256
_MULTIPROCESSORS = 132  # of an H200, for which kernels are collected on machines without one


class Params(NamedTuple):
    """What both kernels are compiled for."""

    kD: int
    kRows: int
    kKeys: int
    kLeast: int
    kWarps: int
    kStages: int
    kDivision: int
    kCluster: int
    kTokenScales: bool
    Element: torch.dtype
    Cache: torch.dtype


class Args(NamedTuple):
    """The parameters of sm90_decode; strides in elements."""

    q: Pointer
    o: Pointer
    lse: Pointer
    partial: Pointer
    stats: Pointer
    k: Pointer
    v: Pointer
    lengths: Pointer
    block_table: Pointer
    cu_seqlens: Pointer
    sinks: Pointer
    k_scale: Pointer
    v_scale: Pointer
    batch: I32
    tokens: I32
    each: I32
    kv_heads: I32
    group: I32
    capacity: I32
    page_size: I32
    left: I32
    causal: bool
    most: I32
    blocks: I32
    scale: F32
    softcap: F32
    q_token: I64
    q_head: I64
    k_page: I64
    k_slot: I64
    k_head: I64
    v_page: I64
    v_slot: I64
    v_head: I64
    table_row: I64
    k_scale_page: I64
    k_scale_slot: I64
    k_scale_head: I64
    v_scale_page: I64
    v_scale_slot: I64
    v_scale_head: I64


class CombineArgs(NamedTuple):
    """The parameters of sm90_decode_combine."""

    partial: Pointer
    stats: Pointer
    o: Pointer
    lse: Pointer
    lengths: Pointer
    cu_seqlens: Pointer
    sinks: Pointer
    batch: I32
    tokens: I32
    each: I32
    kv_heads: I32
    group: I32
    capacity: I32
    left: I32
    most: I32
    blocks: I32
    by_tile: bool


_FILE = Path(__file__).with_name("decode.cuh")
KERNEL = CudaKernel(_FILE, "sm90_decode", Args, archs=("sm_90a",), dependent=True)
COMBINE = CudaKernel(
    _FILE.parent / "fmha_decode" / "combine.cuh", "sm90_decode_combine", CombineArgs, archs=("sm_90a",), dependent=True
)


class Work(NamedTuple):
    """Shares of each key head, all from shapes.

    blocks: of one key head.   least: units of a share at least.   slots: partial sums.   splits: row tiles that the
    second kernel looks at, all of them if by_tile, else as many as there are shares that may continue one.
    """

    division: Division
    blocks: int
    least: int
    slots: int
    splits: int
    by_tile: bool = False


def work_of(args: PagedArgs, config: Config, sms: int) -> Work:
    """How the keys are divided."""
    batch, kv_heads = args.lengths.shape[0], args.k_cache.shape[2]
    group = args.q.shape[1] // kv_heads
    tiles = row_tiles(args.q.shape[0], batch, args.cu_seqlens is not None, group, config.rows)
    units = max(-(-args.capacity // config.keys), 1)
    if args.batch_invariant:
        shares = min(_MOST_SHARES, -(-units // _LEAST_OWN))
        return Work(Division.OWN, tiles * shares, _LEAST_OWN, tiles * shares, tiles if shares > 1 else 0, True)
    if config.cluster > 1 and args.cu_seqlens is None:
        return Work(Division.CLUSTER, tiles * config.cluster, 0, 0, 0)
    shares = max(min(sms * config.shares // kv_heads, tiles * units // config.warps), 1)
    by_tile = tiles < shares
    splits = tiles if by_tile else shares - 1
    return Work(Division.EQUAL, shares, config.warps, 2 * shares, splits if shares > 1 else 0, by_tile)


def row_tiles(tokens: int, batch: int, packed: bool, group: int, rows: int) -> int:
    """Row tiles of one key head, at most."""
    if not packed:
        return batch * -(-(tokens // max(batch, 1)) * group // rows)
    return min(tokens, batch + 1) + tokens * group // rows  # each sequence with tokens has one that is not full


def why_not(args: PagedArgs) -> str | None:
    """Why this kernel cannot run, or None if it can."""
    q, v = args.q, args.v_cache
    arch, (d, d_v) = device_info(q.device).arch, (q.shape[2], v.shape[3])
    if arch != "sm_90":
        return f"is written for Hopper (sm_90), and this is {arch}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bf16 or fp16, got {q.dtype}"
    if d != d_v or d not in WIDTHS:
        return f"has D = D_v of {', '.join(map(str, WIDTHS))}, got D={d}, D_v={d_v}"
    sizes = bucket(args)
    if not sizes.aligned:
        return "needs addresses and strides of q and the caches that are multiples of 16 bytes"
    if args.cu_seqlens is not None and args.batch_invariant:
        return "has no packed tokens under batch_invariant: whether it is the faster one depends on the others"
    if sizes.B > MOST_SEQUENCES:
        return f"takes at most {MOST_SEQUENCES} sequences"
    if not sizes.S_q and sizes.T > sizes.B:
        return "is for decoding steps: packed tokens of which there are no more than sequences"
    rows = max(sizes.S_q, 1) * sizes.group
    if not candidates(sizes, q.dtype):
        return f"holds the sums of at most {MOST_SUMS // d} query rows of {d} numbers, got {rows} of a sequence"
    tiles = row_tiles(sizes.T, sizes.B, args.cu_seqlens is not None, sizes.group, 8)
    if tiles * -(-sizes.keys // 16) >= _MOST_UNITS:
        return f"counts less than {_MOST_UNITS} units of 16 keys, got up to {tiles} row tiles of {sizes.keys} keys"
    return None


@register_kernel(
    fmha_decode.FORWARD,
    configure=configure,
    config_type=Config,
    configs=configs(),
    candidates=candidates,
    why_not=why_not,
)
@register_kernel(
    fmha_paged.FORWARD,
    configure=configure,
    config_type=Config,
    configs=configs(),
    candidates=candidates,
    why_not=why_not,
)
def launch(outs: tuple[Tensor, Tensor], args: PagedArgs, config: Config) -> None:
    """Write o (T, H, D) and lse (T, H)."""
    (o, lse), (q, k, v) = outs, (args.q, args.k_cache, args.v_cache)
    (tokens, heads, d), kv_heads, batch = q.shape, k.shape[2], args.lengths.shape[0]
    if not o.numel():
        return
    each = tokens // batch if args.cu_seqlens is None else 0
    group = heads // kv_heads
    capacity = args.capacity if k.shape[0] else 0
    left = min(args.left, capacity)
    work = work_of(args, config, _MULTIPROCESSORS if collecting() is not None else usable_sms(q.device))
    partial = scratch((max(work.slots, 1) * kv_heads * config.rows, d), torch.float32, q.device)
    stats = scratch((max(work.slots, 1) * kv_heads * config.rows, 2), torch.float32, q.device)
    params = Params(
        kD=d,
        kRows=config.rows,
        kKeys=config.keys,
        kLeast=work.least,
        kWarps=config.warps,
        kStages=config.stages,
        kDivision=work.division.value,
        kCluster=config.cluster if work.division is Division.CLUSTER else 1,
        kTokenScales=cache_kind(k, args.k_scale, args.v_scale) == TOKEN_SCALES,
        Element=q.dtype,
        Cache=k.dtype,
    )
    k_strides, v_strides = k.stride(), v.stride()
    k_scale_strides, v_scale_strides = _scale_strides(args.k_scale), _scale_strides(args.v_scale)
    kernel_args = Args(
        q=q,
        o=o,
        lse=lse,
        partial=partial,
        stats=stats,
        k=k,
        v=v,
        lengths=args.lengths,
        block_table=args.block_table,
        cu_seqlens=args.cu_seqlens,
        sinks=args.sinks,
        k_scale=args.k_scale,
        v_scale=args.v_scale,
        batch=batch,
        tokens=tokens,
        each=each,
        kv_heads=kv_heads,
        group=group,
        capacity=capacity,
        page_size=k.shape[1],
        left=left,
        causal=args.causal and each != 1,
        most=_MOST_SHARES,
        blocks=work.blocks,
        scale=args.scale,
        softcap=args.softcap,
        q_token=q.stride(0),
        q_head=q.stride(1),
        k_page=k_strides[0],
        k_slot=k_strides[1],
        k_head=k_strides[2],
        v_page=v_strides[0],
        v_slot=v_strides[1],
        v_head=v_strides[2],
        table_row=0 if args.block_table is None else args.block_table.stride(0),
        k_scale_page=k_scale_strides[0],
        k_scale_slot=k_scale_strides[1],
        k_scale_head=k_scale_strides[2],
        v_scale_page=v_scale_strides[0],
        v_scale_slot=v_scale_strides[1],
        v_scale_head=v_scale_strides[2],
    )
    KERNEL(
        (work.blocks * kv_heads,),
        kernel_args,
        params,
        block=config.warps * 32,
        shared_bytes=shared_bytes(params),
        cluster=(config.cluster, 1, 1) if work.division is Division.CLUSTER else None,
    )
    if work.splits:
        rows = min(config.rows, each * group) if each else config.rows
        COMBINE(
            (work.splits, rows, kv_heads),
            CombineArgs(
                partial=partial,
                stats=stats,
                o=o,
                lse=lse,
                lengths=args.lengths,
                cu_seqlens=args.cu_seqlens,
                sinks=args.sinks,
                batch=batch,
                tokens=tokens,
                each=each,
                kv_heads=kv_heads,
                group=group,
                capacity=capacity,
                left=left,
                most=_MOST_SHARES,
                blocks=work.blocks,
                by_tile=work.by_tile,
            ),
            params._replace(kWarps=1, kStages=1),
            block=_COMBINE_THREADS,
        )


def _scale_strides(scale: Tensor | None) -> tuple[int, ...]:
    """Strides of pages, slots and heads; one scale of a head serves all tokens."""
    if scale is None:
        return 0, 0, 0
    return scale.stride() if scale.dim() == 3 else (0, 0, scale.stride(0))
