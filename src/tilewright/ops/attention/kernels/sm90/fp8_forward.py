"""Attention over e4m3 in CUDA C++ for Hopper, forward: float8 wgmmas multiply while the softmax of another tile runs.

A tile of 64 queries and 128 keys at D = 128 is 4.2 MFLOP, 512 cycles of a multiprocessor's tensor cores in float8, and
8192 exponentials, 512 cycles of its special-function units; at D = 256 it is 1024 and 512.  V is transposed first, once
for all query tiles: 2 * B * H_kv * S_k * D_v bytes.  `fp8_forward.cuh` says what else float8 changes.
4 * B * H * pairs * D flops, with `pairs` the (query, key) that the mask allows: (2, 16, 8192, 128) without a mask
cannot beat 0.56 ms at 1979 TFLOP/s.
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
from tilewright.jit.tensor_map import tensor_map
from tilewright.mask.cuda_program import cuda_type
from tilewright.mask.packed import PACKED_PROGRAMS
from tilewright.mask.tables import tile_table_of
from tilewright.ops.attention import few_queries
from tilewright.ops.attention.bucket import PROGRAM, FmhaBucket, why_not_addressable
from tilewright.ops.attention.fmha_fp8 import FORWARD
from tilewright.ops.attention.fmha_fp8.args import BLOCKS_K, BLOCKS_V, FmhaFp8Args, FmhaFp8Bucket, bucket
from tilewright.ops.attention.fmha_fp8.rounding import SCALE_BLOCK
from tilewright.ops.attention.kernels.sm90.forward import table_strides
from tilewright.ops.attention.kernels.triton.transpose import transposed

_WARPGROUP_M = 64
_MAX_D = 256
_INDICES = {torch.int16: "short", torch.int32: "int"}


class Config(NamedTuple):
    """groups: consumer warpgroups of 64 queries; block_n: keys of a tile; stages: of K and of V; q_stages: of Q;
    turns: warpgroups issue their wgmmas in turns (ping-pong); parts: of columns, in which P V of a tile is computed.
    """

    groups: int
    block_n: int
    stages: int
    q_stages: int
    turns: bool = True
    parts: int = 1


class Params(NamedTuple):
    """What sm90_fmha_fp8 is compiled for."""

    kD: int
    kDv: int
    kWarpgroups: int
    kBlockN: int
    kStages: int
    kQStages: int
    kTurns: bool
    kParts: int
    kScaleV: bool
    kModify: bool
    kSoftcap: bool
    Out: torch.dtype
    Mask: str
    Index: str


class Args(NamedTuple):
    map_q: Map
    map_k: Map
    map_v: Map
    o: Pointer
    lse: Pointer
    q_scale: Pointer
    k_scale: Pointer
    v_scale: Pointer
    sinks: Pointer
    mask_data: Pointer
    counts: Pointer
    indices: Pointer
    s_q: I32
    s_k: I32
    d_v: I32
    heads: I32
    batches: I32
    heads_per_kv: I32
    left: I32
    right: I32
    paired: bool
    batch_stride: I32
    head_stride: I32
    row_stride: I32
    o_batch: I64
    o_head: I64
    o_row: I64
    q_scale_batch: I32
    q_scale_head: I32
    q_scale_block: I32
    k_scale_batch: I32
    k_scale_head: I32
    k_scale_block: I32
    v_scale_batch: I32
    v_scale_head: I32
    v_scale_block: I32
    scale: F32
    softcap: F32


KERNEL = CudaKernel(
    Path(__file__).with_name("fp8_forward.cuh"), "sm90_fmha_fp8", Args, archs=("sm_90a",), dependent=True
)


def forward(outs: tuple[Tensor, Tensor], args: FmhaFp8Args, config: Config) -> None:
    """Write o (B, H, S_q, D_v) and lse (B, H, S_q); S_k > 0."""
    (o, lse), q, k, v, mask = outs, args.q, args.k, args.v, args.mask
    batch, heads, s_q, d = q.shape
    s_k, d_v = v.shape[2:]
    left, right = mask.clamped_band(s_q, s_k)
    block_m = config.groups * _WARPGROUP_M
    table = None
    if mask.mask_data is not None and mask.program not in PACKED_PROGRAMS:
        table = tile_table_of(mask.program, mask.mask_data, batch, heads, s_q, s_k, block_m, config.block_n)
    batch_stride, head_stride, row_stride = table_strides(table)
    tiles, sms = -(-s_q // block_m) * heads * batch, usable_sms(q.device)
    v_t = transposed(v, fragments=True)
    span, span_v = _span(d), _span_v(config.block_n)
    o_batch, o_head, o_row = o.stride()[:3]
    (qb, qh, qn), (kb, kh, kn), (vb, vh, vn) = map(_scale_steps, (args.q_scale, args.k_scale, args.v_scale))
    KERNEL(
        (min(tiles, sms),),
        Args(
            map_q=tensor_map(q, (1, 1, _WARPGROUP_M, span), swizzle=span),
            map_k=tensor_map(k, (1, 1, config.block_n, span), swizzle=span),
            map_v=tensor_map(v_t, (1, 1, _width_v(d_v, config), span_v), swizzle=span_v),
            o=o,
            lse=lse,
            q_scale=args.q_scale,
            k_scale=args.k_scale,
            v_scale=args.v_scale,
            sinks=args.sinks,
            mask_data=mask.mask_data,
            counts=None if table is None else table.counts,
            indices=None if table is None else table.indices,
            s_q=s_q,
            s_k=s_k,
            d_v=d_v,
            heads=heads,
            batches=batch,
            heads_per_kv=heads // k.shape[1],
            left=left,
            right=right,
            # As in the forward in 16 bits: pairs of tiles balance where later queries see more keys
            paired=(mask.program != "" or (left < 0) != (right < 0)) and tiles > sms,
            batch_stride=batch_stride,
            head_stride=head_stride,
            row_stride=row_stride,
            o_batch=o_batch,
            o_head=o_head,
            o_row=o_row,
            q_scale_batch=qb,
            q_scale_head=qh,
            q_scale_block=qn,
            k_scale_batch=kb,
            k_scale_head=kh,
            k_scale_block=kn,
            v_scale_batch=vb,
            v_scale_head=vh,
            v_scale_block=vn,
            scale=args.scale,
            softcap=args.softcap,
        ),
        _params(args, config, torch.int16 if table is None else table.indices.dtype),
        block=128 * (config.groups + 1),
        shared_bytes=shared_bytes(d, d_v, config),
    )


def shared_bytes(d: int, d_v: int, config: Config) -> int:
    """Shared memory of Q and of the stages of K and V."""
    width = -(-d // _span(d)) * _span(d)
    queries = config.q_stages * config.groups * _WARPGROUP_M * width
    return queries + config.stages * config.block_n * (width + _width_v(d_v, config))


def _span(d: int) -> int:
    """Bytes of a row of a box of Q and K, and their swizzle."""
    return 128 if d > 64 else 64


def _span_v(block_n: int) -> int:
    """Keys of a row of a box of the transposed V."""
    return next(span for span in (128, 64, 32) if block_n % span == 0)


def _width_v(d_v: int, config: Config) -> int:
    """Columns of V in shared memory: parts of whole wgmma N of 8, as large as the scores or small beside them."""
    if config.parts == 2 and d_v > 192:
        return 256
    step = max(16, 8 * config.parts)
    return -(-d_v // step) * step


def _scale_steps(scales: Tensor) -> tuple[int, int, int]:
    """Strides of scales (B, H, blocks); 0 along blocks if one scale serves all tokens."""
    return scales.stride(0), scales.stride(1), scales.stride(2) if scales.shape[2] > 1 else 0


def _params(args: FmhaFp8Args, config: Config, index: torch.dtype) -> Params:
    """index: of a tile table."""
    return Params(
        kD=-(-args.q.shape[3] // 32) * 32,
        kDv=_width_v(args.v.shape[3], config),
        kWarpgroups=config.groups,
        kBlockN=config.block_n,
        kStages=config.stages,
        kQStages=config.q_stages,
        kTurns=config.turns,
        kParts=config.parts,
        kScaleV=args.v_scale.shape[2] > 1,
        kModify=args.softcap > 0 or args.scale <= 0,
        kSoftcap=args.softcap > 0,
        Out=args.out_dtype,
        Mask=cuda_type(args.program),
        Index=_INDICES[index],
    )


# ------------------------------------------------------------------------------------------------------- what to choose

_TILES: dict[int, tuple[Config, ...]] = {
    64: (Config(3, 192, 2, 2, parts=2), Config(3, 128, 3, 2), Config(3, 128, 3, 2, turns=False)),
    128: (Config(3, 128, 3, 2), Config(3, 128, 3, 2, turns=False)),
    256: (Config(2, 128, 2, 1, parts=2), Config(2, 128, 2, 1, turns=False, parts=2)),
}
"""Keyed by the largest D or D_v.  `configure` takes the first that `candidates` leaves, the fastest on an H100.

At D = 128 turns are worth 6 to 8 %; without them two warpgroups with P V in flight beside the next S take 10 % longer,
three with 96 keys 16 %.  At D = 256 64 keys take 44 % longer.  At D = 64 192 keys are 4 to 7 % ahead of 128.
"""


_FEW_QUERIES, _MANY_KEYS = 256, 1024
_SHORT = 512  # queries and keys


def configure(bucket: FmhaFp8Bucket, dtype: torch.dtype) -> Config | None:
    """The first candidate, in up to 1024 queries one with 128 keys; None where the Triton kernel is faster.

    That is with few queries behind many keys (one of 12 heads behind 2000: 26 us, 32 here), and where both are short
    ((16, 2, 251, 64): 8.4, 11.7; (1, 32/8, 512, 128), causal: 14.8, 16.3; H200, 2026-11).  The batch is ignored, so
    that results do not depend on it.
    """
    if bucket.S_q * bucket.group <= _FEW_QUERIES and bucket.S_k > _MANY_KEYS:
        return None
    if few_queries.why_not(FmhaBucket(*bucket[:-1])) is None:  # (1, 32/8, 1 x 1024, 128): 8.2 us, 22.3 here (H200)
        return None
    if max(bucket.S_q, bucket.S_k) <= _SHORT:
        return None
    tiles = candidates(bucket, dtype)
    # (4, 16, 1000, 64): 47.7 us with 128 keys, 50.5 with 192
    return next((tile for tile in tiles if bucket.S_q > 1024 or tile.block_n <= SCALE_BLOCK), tiles[0])


def candidates(bucket: FmhaFp8Bucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Tiles that fit the registers and shared memory at these widths.  If scales of keys are those of blocks, a tile
    lies in one; a mask program has the same tiles, because more scores would spill.

    Three warpgroups have 160 registers a thread: beside 64 scores and O they hold parts of P V up to 56 columns wide,
    or of 128, which are one array with the scores.
    """
    tiles = next(tiles for largest, tiles in _TILES.items() if largest >= max(bucket.D, bucket.D_v))
    if bucket.blocks & (BLOCKS_K | BLOCKS_V) or bucket.mask == PROGRAM:
        tiles = tuple(tile for tile in tiles if SCALE_BLOCK % tile.block_n == 0)
    parts = 2 if 64 < bucket.D_v <= 112 else 1
    return tuple(tile._replace(parts=max(tile.parts, parts)) for tile in tiles)


CONFIGS: tuple[Config, ...] = tuple(
    dict.fromkeys(config._replace(parts=n) for tiles in _TILES.values() for config in tiles for n in (config.parts, 2))
)
"""Every config that `configure` and `candidates` can return."""


def why_not(args: FmhaFp8Args) -> str | None:
    arch, d, d_v = device_info(args.q.device).arch, args.q.shape[3], args.v.shape[3]
    if arch != "sm_90":
        return f"is written for Hopper's tensor cores (sm_90), and this is {arch}"
    if max(d, d_v) > _MAX_D or d_v % 8:
        return f"has head dimensions up to {_MAX_D}, D_v a multiple of 8, got D={d}, D_v={d_v}"
    return why_not_addressable(FmhaBucket(*bucket(args)[:-1]))


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor, Tensor], args: FmhaFp8Args, config: Config) -> None:
    forward(outs, args, config)
