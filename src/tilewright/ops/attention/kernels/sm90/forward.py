"""Attention forward in CUDA C++ for Hopper: the tensor cores multiply while the softmax runs.

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

from tilewright.hardware.device import device_info
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tensor_map import tensor_map
from tilewright.mask.cuda_program import cuda_type
from tilewright.mask.packed import PACKED_PROGRAM
from tilewright.mask.tables import TileTable, tile_table_of
from tilewright.ops.attention.band import clamped_band
from tilewright.ops.attention.fmha.raw import BUCKET, PROGRAM

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


_FILE, _REST = Path(__file__).with_name("forward.cuh"), "PPPPPPiiiiiii?iiiff"
KERNEL = CudaKernel(_FILE, "sm90_fmha", f"TTTT{_REST}", archs=("sm_90a",), dependent=True)
KERNEL_PE = CudaKernel(_FILE, "sm90_mla", f"TTTTTT{_REST}", archs=("sm_90a",), dependent=True)
"""The same with the rope parts of q and k in separate tensors."""


def forward(
    o: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    mask_data: Tensor | None,
    program: str,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    config: Config,
    pe: tuple[Tensor, Tensor] | None = None,
) -> None:
    """o (B, H, S_q, D_v) and lse (B, H, S_q) of q (B, H, S_q, D), k (B, H_kv, S_k, D), v (B, H_kv, S_k, D_v), S_k > 0.

    pe: q_pe (B, H, S_q, D_pe) and k_pe (B, 1, S_k, D_pe), D_pe <= 64: q_pe k_pe^T is added to the scores.
    left, right: the band, -1 unlimited; program, mask_data: a mask that is not a band.  See `fmha/raw.py`.
    """
    batch, heads, s_q, d = q.shape
    s_k, d_v = v.shape[2:]
    d = columns(d, 0 if pe is None else pe[0].shape[3])
    left, right = clamped_band(left, right, s_q, s_k)
    heads_per_kv = heads // k.shape[1]
    block_m = config.groups * _WARPGROUP_M
    table = None
    if mask_data is not None and program != PACKED_PROGRAM:
        table = tile_table_of(program, mask_data, batch, heads, s_q, s_k, block_m, config.block_n)
    index = torch.int16 if table is None else table.indices.dtype
    params = _params(d, d_v, softcap > 0, slopes is not None, scale <= 0, q.dtype, config, program, index)
    queries, keys = ((q,), (k,)) if pe is None else ((q, pe[0]), (k, pe[1]))
    maps = (
        *(tensor_map(t, (1, 1, _WARPGROUP_M, _BOX_COLUMNS), swizzle=_SWIZZLE) for t in queries),
        *(tensor_map(t, (1, 1, config.block_n, _BOX_COLUMNS), swizzle=_SWIZZLE) for t in (*keys, v)),
        tensor_map(o, (1, 1, _WARPGROUP_M, _BOX_COLUMNS), swizzle=_SWIZZLE),
    )
    tiles, sms = -(-s_q // block_m) * heads * batch, usable_sms(q.device)
    # Later queries see more keys if the band has one bound, and may under a program: pairs of tiles balance the work
    paired = (program != "" or (left < 0) != (right < 0)) and tiles > sms
    kernel = KERNEL if pe is None else KERNEL_PE
    kernel(
        (min(tiles, sms),),
        (
            *maps,
            lse,
            0 if sinks is None else sinks,
            0 if slopes is None else slopes,
            0 if mask_data is None else mask_data,
            *((0, 0) if table is None else table),
            *(s_q, s_k, heads, batch, heads_per_kv, left, right, paired),
            *_table_strides(table),
            scale,
            softcap,
        ),
        params,
        block=128 * (config.groups + 1),
        shared_bytes=shared_bytes(d, d_v, config),
    )


def columns(d: int, d_pe: int) -> int:
    """Number of head-dim columns a score sums over.  The rope part starts at a fresh 64-column TMA box."""
    return -(-d // _BOX_COLUMNS) * _BOX_COLUMNS + d_pe if d_pe else d


def why_not(q: Tensor, v: Tensor, d_pe: int = 0) -> str | None:
    """Why this engine cannot run over these operands with a rope part of d_pe columns, or None if it can."""
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


def _params(
    d: int,
    d_v: int,
    softcap: bool,
    slope: bool,
    nonpositive_scale: bool,
    dtype: torch.dtype,
    config: Config,
    program: str = "",
    index: torch.dtype = torch.int16,
) -> Params:
    return Params(
        kD=-(-d // 16) * 16,
        kDv=-(-d_v // 16) * 16,
        kWarpgroups=config.groups,
        kBlockN=config.block_n,
        kStages=config.stages,
        kQStages=config.q_stages,
        kTurns=config.turns,
        kModify=softcap or slope or nonpositive_scale,
        kSoftcap=softcap,
        kSlope=slope,
        Element=dtype,
        Mask=cuda_type(program),
        Index=_INDICES[index],
    )


def _table_strides(table: TileTable | None) -> tuple[int, int, int]:
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


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """The tile for a bucket of `fmha/raw.py`.  It ignores batch and length, so that results do not depend on them."""
    return candidates(bucket, dtype)[0]


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Tiles that fit the registers and shared memory at this D."""
    named = dict(zip(BUCKET, bucket, strict=True))
    tiles = next(tiles for largest, tiles in _TILES.items() if named["D"] <= largest)
    if named["mask"] != PROGRAM:
        return tiles
    return tuple(t for t in tiles if named["D_v"] // 2 + t.block_n * 3 // 4 <= _REGISTERS_WITH_PROGRAM)


CONFIGS: tuple[Config, ...] = tuple(dict.fromkeys(config for tiles in _TILES.values() for config in tiles))
"""Every config that `configure` and `candidates` can return."""
