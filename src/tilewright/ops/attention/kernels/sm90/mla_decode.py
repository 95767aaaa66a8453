"""mla_decode in CUDA C++ for Hopper: blocks of 64 query rows over tiles of 64 keys, O in two warpgroups' registers.

Bytes: each key once from the L2 for 64 query rows, 1152 of them, and q and o.  128 sequences of 4096 tokens with 128
heads: 604 MB, 137 us at 4.4 TB/s, and 146 GFLOP, 183 us at 800 TFLOP/s; with 16 heads the bytes are the bound.
`mla_decode.cuh` says how the work of a block is divided, `mla_decode_parts/schedule.cuh` how that of a launch is.
"""

from math import gcd
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.hardware.device import device_info
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.compilers.kernel_args import F32, I32, Map, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tape import scratch
from tilewright.jit.tensor_map import VECTOR, plain_strides, tensor_map
from tilewright.ops.attention.layout import addressable
from tilewright.ops.attention.mla_decode import FORWARD
from tilewright.ops.attention.mla_decode.args import PACKED, MlaDecodeArgs, MlaDecodeBucket

_ROWS, _COLUMNS, _SWIZZLE = 64, 64, 128  # of a slab, as in mla_decode_parts/shape.cuh
_D, _D_V, _P_STAGES, _THREADS = 576, 512, 2, 512
_SLAB_BYTES = _ROWS * _SWIZZLE
_GATHER_ROPES, _GATHER_Q_REGISTERS = 1, 4  # the warpgroup that gathers needs registers that hold q, which needs a slab
_GATHER_AHEAD = 3  # key tiles fetched ahead into the L2
_COMBINE_THREADS = 512
_COMBINE_WARPS = 4096  # about as many as run at once


class Config(NamedTuple):
    """quads: left and right halves of key tiles in shared memory; ropes: rotated parts.   q_registers: slabs of q, of
    nine, in registers.   late_left, late_right: steps of P V, of four, that wait for all but the last `tail` steps of
    the next scores.   least: key tiles of a share, where row tiles may be cut; cost: key tiles that cutting costs.
    """

    quads: int = 5
    ropes: int = 2
    q_registers: int = 6
    tail: int = 8
    late_left: int = 0
    late_right: int = 4
    least: int = 4
    cost: int = 4


class Params(NamedTuple):
    kQuads: int
    kRopes: int
    kQRegisters: int
    kTail: int
    kLateLeft: int
    kLateRight: int
    kAhead: int
    kBoxRows: int
    kPacked: bool
    kSparse: bool
    Element: torch.dtype


class Args(NamedTuple):
    map_q: Map
    map_kv: Map
    cache: Pointer
    o: Pointer
    lse: Pointer
    partial_o: Pointer
    partial_lse: Pointer
    lengths: Pointer
    block_table: Pointer
    indices: Pointer
    sinks: Pointer
    batches: I32
    tiles: I32
    rows: I32
    heads: I32
    s_q: I32
    capacity: I32
    each: I32
    table_stride: I32
    page_size: I32
    pages: I32
    page_units: I32
    row_units: I32
    causal: bool
    blocks: I32
    least: I32
    cost: I32
    scale: F32


class CombineParams(NamedTuple):
    kThreads: int
    Element: torch.dtype


class CombineArgs(NamedTuple):
    partial_o: Pointer
    partial_lse: Pointer
    o: Pointer
    lse: Pointer
    lengths: Pointer
    sinks: Pointer
    batches: I32
    tiles: I32
    rows: I32
    heads: I32
    s_q: I32
    capacity: I32
    each: I32
    causal: bool
    blocks: I32
    least: I32
    cost: I32
    warps_each: I32


_FILE = Path(__file__).with_name("mla_decode.cuh")
KERNEL = CudaKernel(_FILE, "sm90_mla_decode", Args, archs=("sm_90a",), dependent=True)
COMBINE = CudaKernel(
    _FILE.with_name("mla_decode_combine.cuh"), "sm90_mla_decode_combine", CombineArgs, archs=("sm_90a",), dependent=True
)


def shared_bytes(values: Params) -> int:
    """Shared memory of the rings, of q and of P."""
    slabs = 4 * values.kQuads + values.kRopes + 9 - values.kQRegisters + _P_STAGES
    return slabs * _SLAB_BYTES


def params(args: MlaDecodeArgs, config: Config) -> Params:
    """What the kernel is compiled for."""
    gathers = args.is_gathered  # by a warpgroup, and not by the TMA
    full_box = args.block_table is None or gathers
    return Params(
        kQuads=config.quads,
        kRopes=_GATHER_ROPES if gathers else config.ropes,
        kQRegisters=_GATHER_Q_REGISTERS if gathers else config.q_registers,
        kTail=config.tail,
        kLateLeft=config.late_left,
        kLateRight=config.late_right,
        kAhead=_GATHER_AHEAD if gathers else 0,
        kBoxRows=_ROWS if full_box else gcd(args.kv_cache.shape[1], _ROWS),
        kPacked=args.is_packed,
        kSparse=args.indices is not None,
        Element=args.q.dtype,
    )


def rows_of(args: MlaDecodeArgs) -> int:
    """Query rows that share their keys."""
    return args.q.shape[2] * (1 if args.indices is not None else args.q.shape[1])


def why_not(args: MlaDecodeArgs) -> str | None:
    """Why this kernel cannot run, or None."""
    q, cache = args.q, args.kv_cache
    arch = device_info(q.device).arch
    if arch != "sm_90":
        return f"is written for Hopper's tensor cores (sm_90), and this is {arch}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bf16 or fp16, got {q.dtype}"
    if (q.shape[3], args.d_v) != (_D, _D_V):
        return f"has D = {_D} and d_v = {_D_V}, got D = {q.shape[3]}, d_v = {args.d_v}"
    if not (q.numel() and cache.numel() and args.capacity):
        return "has nothing to read"
    if args.scale <= 0:
        return f"takes a positive scale, got {args.scale}"
    if not (addressable(q) and addressable(cache)):
        return "needs addresses and strides of q and kv_cache that are multiples of 16 bytes"
    if not args.is_near:
        return "reaches 64 GiB of single rows"
    if not args.has_merged_rows:
        inner, outer = ("tokens", "sequences") if args.indices is not None else ("heads", "tokens")
        return f"needs {outer} of q that follow their {inner} at one stride"
    return None


CONFIGS = (Config(), Config(late_right=0), Config(tail=0), Config(q_registers=5))
"""Every config that `configure` and `candidates` can return."""


def configure(bucket: MlaDecodeBucket, dtype: torch.dtype) -> Config | None:
    """One for all sizes, and none where Triton was ahead on an H200: rows of 16-bit tokens that indices name (64 x 128
    heads x 2048: 247 us and 185), and one sequence of packed tokens (8192: 36.1 us and 30.3).
    """
    if bucket.sparse and bucket.cache != PACKED:
        return None
    if bucket.cache == PACKED and not bucket.sparse and bucket.B == 1:
        return None
    return CONFIGS[0]


def candidates(bucket: MlaDecodeBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return CONFIGS


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor, Tensor], args: MlaDecodeArgs, config: Config) -> None:
    """Write o (B, S_q, H, 512) and lse (B, S_q, H)."""
    (o, lse), q, cache, table = outs, args.q, args.kv_cache, args.block_table
    (batch, tokens, heads, _), rows, values = q.shape, rows_of(args), params(args, config)
    each = tokens if args.indices is not None else 1
    batch, tiles, blocks = batch * each, -(-rows // _ROWS), usable_sms(q.device)
    least = 0 if args.batch_invariant or args.capacity <= config.least * _ROWS else config.least
    if not least:
        blocks = min(blocks, batch * tiles)
    slots = 2 * blocks * _ROWS if least else 1
    partial_o = scratch((slots, _D_V), torch.float32, q.device)
    partial_lse = scratch((slots,), torch.float32, q.device)
    division = (blocks, least, config.cost)
    sizes = (batch, tiles, rows, heads, rows // heads, args.capacity, each)
    map_q = tensor_map(q.flatten(0, 1) if each > 1 else q.flatten(1, 2), (1, _ROWS, _COLUMNS), swizzle=_SWIZZLE)
    box = (1, values.kBoxRows, _COLUMNS)
    page_units, row_units = (stride * cache.itemsize // VECTOR for stride in plain_strides(cache)[:2])
    KERNEL(
        (blocks,),
        Args(
            map_q,
            map_q if args.is_gathered else tensor_map(cache, box, swizzle=_SWIZZLE),
            cache,
            o,
            lse,
            partial_o,
            partial_lse,
            args.lengths,
            table,
            args.indices,
            args.sinks,
            *sizes,
            0 if table is None else table.stride(0),
            cache.shape[1],
            cache.shape[0],
            page_units,
            row_units,
            args.causal,
            *division,
            args.scale,
        ),
        values,
        block=_THREADS,
        shared_bytes=shared_bytes(values),
    )
    if not least:
        return
    cut, cut_rows = min(batch * tiles, blocks - 1), min(rows, _ROWS)
    warps = _COMBINE_THREADS // 32
    warps_each = min(warps, 1 << max(0, (_COMBINE_WARPS // (cut * cut_rows)).bit_length() - 1))
    COMBINE(
        (cut, -(-cut_rows * warps_each // warps)),
        CombineArgs(
            partial_o,
            partial_lse,
            o,
            lse,
            args.lengths,
            args.sinks,
            *sizes,
            args.causal,
            *division,
            warps_each,
        ),
        CombineParams(_COMBINE_THREADS, q.dtype),
        block=_COMBINE_THREADS,
    )
