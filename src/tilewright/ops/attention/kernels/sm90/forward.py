"""Attention forward in CUDA C++ for Hopper, of `fmha` and `fmha_varlen`: the tensor cores multiply while the softmax
runs.  `mla.py` launches it with two more operands.

A tile of 128 queries and 128 keys at D = 128 is 8.4 MFLOP, 2048 cycles of a multiprocessor's tensor cores, and 16384
exponentials, 1024 cycles of its special-function units: so D = 128 can come near the speed of a GEMM, and at D = 64,
where both take 1024, every cycle that the two do not overlap is lost.  `forward.cuh` says how they overlap.
A band (causal, a window, no mask) and packed sequences are known to the kernel.  For any other mask program two small
kernels first build a table of the key tiles that are needed.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.hardware.device import device_info
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.compilers.kernel_args import F32, I32, Map, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tensor_map import tensor_map
from tilewright.mask.cuda_program import cuda_type
from tilewright.mask.packed import PACKED_PROGRAMS
from tilewright.mask.tables import TileTable, tile_table_of
from tilewright.ops.attention import fmha, fmha_varlen
from tilewright.ops.attention.arguments import FmhaArgs
from tilewright.ops.attention.bucket import PROGRAM, FmhaBucket, forward_bucket, why_not_addressable

_SWIZZLE, _WARPGROUP_M = 128, 64  # as in fmha_forward/shape.cuh
_BOX_COLUMNS = _SWIZZLE // 2  # elements of 16 bits
_MAX_D = 256
_INDICES = {torch.int16: "short", torch.int32: "int"}


class Config(NamedTuple):
    """groups: consumer warpgroups of 64 queries; block_n: keys of a tile; stages: of K and of V; q_stages: of Q;
    turns: warpgroups issue their wgmmas in turns (ping-pong).
    """

    groups: int
    block_n: int
    stages: int
    q_stages: int
    turns: bool = True


class Params(NamedTuple):
    """What sm90_fmha and sm90_mla are compiled for."""

    kD: int
    kDv: int
    kWarpgroups: int
    kBlockN: int
    kStages: int
    kQStages: int
    kTurns: bool
    kModify: bool
    kSoftcap: bool
    kSlope: bool
    Element: torch.dtype
    Mask: str
    Index: str


class Args(NamedTuple):
    map_q: Map
    map_k: Map
    map_v: Map
    map_o: Map
    lse: Pointer
    sinks: Pointer
    slopes: Pointer
    mask_data: Pointer
    counts: Pointer
    indices: Pointer
    s_q: I32
    s_k: I32
    heads: I32
    batches: I32
    heads_per_kv: I32
    left: I32
    right: I32
    paired: bool
    batch_stride: I32
    head_stride: I32
    row_stride: I32
    scale: F32
    softcap: F32


class RopeArgs(NamedTuple):
    map_q: Map
    map_q_pe: Map
    map_k: Map
    map_k_pe: Map
    map_v: Map
    map_o: Map
    lse: Pointer
    sinks: Pointer
    slopes: Pointer
    mask_data: Pointer
    counts: Pointer
    indices: Pointer
    s_q: I32
    s_k: I32
    heads: I32
    batches: I32
    heads_per_kv: I32
    left: I32
    right: I32
    paired: bool
    batch_stride: I32
    head_stride: I32
    row_stride: I32
    scale: F32
    softcap: F32


_FILE = Path(__file__).with_name("forward.cuh")
KERNEL = CudaKernel(_FILE, "sm90_fmha", Args, archs=("sm_90a",), dependent=True)
KERNEL_PE = CudaKernel(_FILE, "sm90_mla", RopeArgs, archs=("sm_90a",), dependent=True)
"""The same with the rope parts of q and k in separate tensors."""


def forward(
    outs: tuple[Tensor, Tensor], args: FmhaArgs, config: Config, pe: tuple[Tensor, Tensor] | None = None
) -> None:
    """Write o (B, H, S_q, D_v) and lse (B, H, S_q); S_k > 0.

    pe: q_pe (B, H, S_q, D_pe) and k_pe (B, 1, S_k, D_pe), D_pe <= 64: q_pe k_pe^T is added to the scores.
    """
    (o, lse), q, v, mask = outs, args.q, args.v, args.mask
    batch, heads, s_q, d = q.shape
    s_k, d_v = v.shape[2:]
    d = columns(d, 0 if pe is None else pe[0].shape[3])
    left, right = mask.clamped_band(s_q, s_k)
    block_m = config.groups * _WARPGROUP_M
    table = None
    if mask.mask_data is not None and mask.program not in PACKED_PROGRAMS:
        table = tile_table_of(mask.program, mask.mask_data, batch, heads, s_q, s_k, block_m, config.block_n)
    query_box, key_box = ((1, 1, rows, _BOX_COLUMNS) for rows in (_WARPGROUP_M, config.block_n))
    boxes = {"q": (q, query_box), "k": (args.k, key_box), "v": (v, key_box), "o": (o, query_box)}
    if pe is not None:
        boxes |= {"q_pe": (pe[0], query_box), "k_pe": (pe[1], key_box)}
    batch_stride, head_stride, row_stride = table_strides(table)
    tiles, sms = -(-s_q // block_m) * heads * batch, usable_sms(q.device)
    kernel, kernel_args = (KERNEL, Args) if pe is None else (KERNEL_PE, RopeArgs)
    kernel(
        (min(tiles, sms),),
        kernel_args(
            **{f"map_{name}": tensor_map(t, box, swizzle=_SWIZZLE) for name, (t, box) in boxes.items()},
            lse=lse,
            sinks=args.sinks,
            slopes=args.slopes,
            mask_data=mask.mask_data,
            counts=None if table is None else table.counts,
            indices=None if table is None else table.indices,
            s_q=s_q,
            s_k=s_k,
            heads=heads,
            batches=batch,
            heads_per_kv=heads // args.k.shape[1],
            left=left,
            right=right,
            # Later queries see more keys if the band has one bound, and may under a program: pairs of tiles balance
            paired=(mask.program != "" or (left < 0) != (right < 0)) and tiles > sms,
            batch_stride=batch_stride,
            head_stride=head_stride,
            row_stride=row_stride,
            scale=args.scale,
            softcap=args.softcap,
        ),
        _params(args, (d, d_v), config, torch.int16 if table is None else table.indices.dtype),
        block=128 * (config.groups + 1),
        shared_bytes=shared_bytes(d, d_v, config),
    )


def columns(d: int, d_pe: int) -> int:
    """Number of head-dim columns a score sums over.  The rope part starts at a fresh 64-column TMA box."""
    return -(-d // _BOX_COLUMNS) * _BOX_COLUMNS + d_pe if d_pe else d


def why_not_operands(q: Tensor, v: Tensor, d_pe: int = 0) -> str | None:
    """Why this kernel cannot run over these operands with a rope part of d_pe columns, or None if it can."""
    arch, d, d_v = device_info(q.device).arch, columns(q.shape[3], d_pe), v.shape[3]
    if arch != "sm_90":
        return f"is written for Hopper's tensor cores (sm_90), and this is {arch}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bf16 or fp16, got {q.dtype}"
    if d_pe > _BOX_COLUMNS:
        return f"has rotated parts of up to {_BOX_COLUMNS} numbers, got D_pe={d_pe}"
    if d > _MAX_D or d_v > d or d_v % 8:
        dims = f"D={d}" if not d_pe else f"{d} (D={q.shape[3]} in whole {_BOX_COLUMNS}s, D_pe={d_pe})"
        return f"has head dimensions up to {_MAX_D}, D_v at most D and a multiple of 8, got {dims}, D_v={d_v}"
    return None


def shared_bytes(d: int, d_v: int, config: Config) -> int:
    """Shared memory of Q and the K/V stages.  O is staged in Q's buffer."""
    boxes, boxes_v = -(-d // _BOX_COLUMNS), -(-d_v // _BOX_COLUMNS)
    queries = config.q_stages * config.groups * boxes * _WARPGROUP_M * _SWIZZLE
    return queries + config.stages * (boxes + boxes_v) * config.block_n * _SWIZZLE


def _params(args: FmhaArgs, widths: tuple[int, int], config: Config, index: torch.dtype) -> Params:
    """widths: columns that a score sums over, and D_v.   index: of a tile table."""
    (d, d_v), softcap, slope = widths, args.softcap > 0, args.slopes is not None
    return Params(
        kD=-(-d // 16) * 16,
        kDv=-(-d_v // 16) * 16,
        kWarpgroups=config.groups,
        kBlockN=config.block_n,
        kStages=config.stages,
        kQStages=config.q_stages,
        kTurns=config.turns,
        kModify=softcap or slope or args.scale <= 0,
        kSoftcap=softcap,
        kSlope=slope,
        Element=args.q.dtype,
        Mask=cuda_type(args.program),
        Index=_INDICES[index],
    )


def table_strides(table: TileTable | None) -> tuple[int, int, int]:
    """Strides of a tile table: batch and head in rows (0 if there is one), row in indices."""
    if table is None:
        return 0, 0, 0
    batch, heads, rows, pitch = table.indices.shape
    return rows * heads if batch > 1 else 0, rows if heads > 1 else 0, pitch


# ------------------------------------------------------------------------------------------------------- what to choose

_TILES: dict[int, tuple[Config, ...]] = {
    64: (Config(3, 128, 2, 2),),
    128: (Config(2, 128, 2, 2, turns=False), Config(2, 128, 2, 2)),
    192: (Config(2, 112, 2, 1), Config(2, 96, 2, 1)),
    256: (Config(2, 64, 2, 1), Config(2, 80, 2, 1)),
}
"""Keyed by the largest D.  `configure` takes the first, the fastest on an H200.

At D = 128 tiles of 96 to 192 keys other than 128 are 2 to 10 % slower on five shapes; at D = 64 two warpgroups are
30 % slower than three.
"""


_REGISTERS_WITH_PROGRAM = 176
"""Registers per thread (of 232) for acc, scores and P under a mask program: with more, the program spills."""


def configure(bucket: FmhaBucket, dtype: torch.dtype) -> Config:
    """The first candidate.  Batch and length are ignored, so that results do not depend on them."""
    return candidates(bucket, dtype)[0]


def candidates(bucket: FmhaBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Tiles that fit the registers and shared memory at this D."""
    tiles = next(tiles for largest, tiles in _TILES.items() if largest >= bucket.D)
    if bucket.mask != PROGRAM:
        return tiles
    return tuple(t for t in tiles if bucket.D_v // 2 + t.block_n * 3 // 4 <= _REGISTERS_WITH_PROGRAM)


CONFIGS: tuple[Config, ...] = tuple(dict.fromkeys(config for tiles in _TILES.values() for config in tiles))
"""Every config that `configure` and `candidates` can return."""


def why_not(args: FmhaArgs) -> str | None:
    return why_not_addressable(forward_bucket(args)) or why_not_operands(args.q, args.v)


@register_kernel(
    fmha.FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
@register_kernel(
    fmha_varlen.FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=why_not,
)
def launch(outs: tuple[Tensor, Tensor], args: FmhaArgs, config: Config) -> None:
    forward(outs, args, config)
