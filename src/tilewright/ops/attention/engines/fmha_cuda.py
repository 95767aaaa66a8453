"""Attention forward in CUDA C++ for Hopper: the tensor cores multiply while the softmax runs beside them.

A tile of 128 queries and 128 keys at D = 128 is 8.4 MFLOP, 2048 cycles of a multiprocessor's tensor cores, and 16384
exponentials, 1024 cycles of its special-function units: so D = 128 can come near the speed of a GEMM, and at D = 64,
where both take 1024, every cycle that the two do not overlap is lost.  `sm90_fmha.cuh` says how they overlap.
A band (causal, windows, none) and packed sequences cost nothing but their tiles; of other masks two small kernels list
the tiles first.
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
from tilewright.mask.packed import ALONE
from tilewright.mask.tables import TileTable, tile_table_of
from tilewright.ops.attention.band import within
from tilewright.ops.attention.fmha.raw import BUCKET, PROGRAM

_SPAN, _ROWS = 128, 64  # as in the header: bytes of a row of a box, queries of a warpgroup
_WIDE = _SPAN // 2  # elements of 16 bits
_MAX_D = 256
_INDICES = {torch.int16: "short", torch.int32: "int"}


class Config(NamedTuple):
    """groups: warpgroups of 64 queries; block_n: keys of a tile; stages: of the rings of K and V; q_stages: of Q;
    turns: whether warpgroups issue their products one after another.
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


_FILE, _REST = Path(__file__).with_name("sm90_fmha.cuh"), "PPPPPPiiiiiii?iiiff"
KERNEL = CudaKernel(_FILE, "sm90_fmha", f"TTTT{_REST}", archs=("sm_90a",), dependent=True)
KERNEL_PE = CudaKernel(_FILE, "sm90_mla", f"TTTTTT{_REST}", archs=("sm_90a",), dependent=True)
"""The same with the rotated parts of queries and keys apart."""


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

    pe: q_pe (B, H, S_q, D_pe) and k_pe (B, 1, S_k, D_pe), D_pe <= 64: their products are added to those of q and k.
    left, right: the band, -1 unlimited; program, mask_data: a mask that is no band.  See `fmha/raw.py`.
    """
    batch, heads, s_q, d = q.shape
    s_k, d_v = v.shape[2:]
    d = columns(d, 0 if pe is None else pe[0].shape[3])
    left, right = within(left, right, s_q, s_k)
    sharing = heads // k.shape[1]
    block_m = config.groups * _ROWS
    table = None
    if mask_data is not None and program != ALONE:
        table = tile_table_of(program, mask_data, batch, heads, s_q, s_k, block_m, config.block_n)
    index = torch.int16 if table is None else table.indices.dtype
    params = _params(d, d_v, softcap > 0, slopes is not None, scale <= 0, q.dtype, config, program, index)
    queries, keys = ((q,), (k,)) if pe is None else ((q, pe[0]), (k, pe[1]))
    maps = (
        *(tensor_map(t, (1, 1, _ROWS, _WIDE), swizzle=_SPAN) for t in queries),
        *(tensor_map(t, (1, 1, config.block_n, _WIDE), swizzle=_SPAN) for t in (*keys, v)),
        tensor_map(o, (1, 1, _ROWS, _WIDE), swizzle=_SPAN),
    )
    tiles, processors = -(-s_q // block_m) * heads * batch, usable_sms(q.device)
    # Later queries see more keys where one side alone is bounded, or may under a program; a block has several tiles
    paired = (program != "" or (left < 0) != (right < 0)) and tiles > processors
    kernel = KERNEL if pe is None else KERNEL_PE
    kernel(
        (min(tiles, processors),),
        (
            *maps,
            lse,
            0 if sinks is None else sinks,
            0 if slopes is None else slopes,
            0 if mask_data is None else mask_data,
            *((0, 0) if table is None else table),
            *(s_q, s_k, heads, batch, sharing, left, right, paired),
            *_steps(table),
            scale,
            softcap,
        ),
        params,
        block=128 * (config.groups + 1),
        shared_bytes=shared_bytes(d, d_v, config),
    )


def columns(d: int, d_pe: int) -> int:
    """That a score is the sum over; rotated parts, if any, begin with a box of their own."""
    return -(-d // _WIDE) * _WIDE + d_pe if d_pe else d


def refusal(q: Tensor, v: Tensor, d_pe: int = 0) -> str | None:
    """Why this engine cannot run over these operands, and rotated parts of d_pe numbers; None if it can."""
    arch, d, d_v = device_info(q.device).arch, columns(q.shape[3], d_pe), v.shape[3]
    if arch != "sm_90":
        return f"is written for Hopper's tensor cores (sm_90), and this is {arch}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bf16 or fp16, got {q.dtype}"
    if d_pe > _WIDE:
        return f"has rotated parts of up to {_WIDE} numbers, got D_pe={d_pe}"
    if d > _MAX_D or d_v > d or d_v % 8:
        given = f"D={d}" if not d_pe else f"{d} (D={q.shape[3]} in whole {_WIDE}s, D_pe={d_pe})"
        return f"has head dimensions up to {_MAX_D}, D_v at most D and a multiple of 8, got {given}, D_v={d_v}"
    return None


def shared_bytes(d: int, d_v: int, config: Config) -> int:
    """Of Q and the rings; O leaves through Q."""
    boxes, boxes_v = -(-d // _WIDE), -(-d_v // _WIDE)
    queries = config.q_stages * config.groups * boxes * _ROWS * _SPAN
    return queries + config.stages * (boxes + boxes_v) * config.block_n * _SPAN


def _params(
    d: int,
    d_v: int,
    softcap: bool,
    slope: bool,
    unsigned: bool,
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
        kModify=softcap or slope or unsigned,
        kSoftcap=softcap,
        kSlope=slope,
        Element=dtype,
        Mask=cuda_type(program),
        Index=_INDICES[index],
    )


def _steps(table: TileTable | None) -> tuple[int, int, int]:
    """From batch to batch and head to head of a table in rows, 0 where it has one; from row to row in indices."""
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
"""By the largest D; the first is what `configure` takes: the fastest on an H200.

At D = 128 tiles of 96 to 192 other keys are 2 to 10 % slower on five shapes, and at D = 64 two warpgroups 30 %.
"""


_REGISTERS_WITH_PROGRAM = 176
"""Of 232, for a thread's sums, scores and P: what a program needs beside them would spill."""


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """The tile for a bucket of `fmha/raw.py`: not by batch or length, so that a result does not depend on them."""
    return candidates(bucket, dtype)[0]


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Tiles that fit the registers and shared memory at this D."""
    found = dict(zip(BUCKET, bucket, strict=True))
    tiles = next(tiles for most, tiles in _TILES.items() if found["D"] <= most)
    if found["mask"] != PROGRAM:
        return tiles
    return tuple(t for t in tiles if found["D_v"] // 2 + t.block_n * 3 // 4 <= _REGISTERS_WITH_PROGRAM)


CONFIGS: tuple[Config, ...] = tuple(dict.fromkeys(config for tiles in _TILES.values() for config in tiles))
"""Every config that `configure` and `candidates` can return."""
