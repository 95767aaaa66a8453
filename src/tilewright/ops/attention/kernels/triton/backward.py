"""Attention backward in Triton: one kernel for dk and dv, one for dq, deterministic.

Both recompute S = Q K^T and dP = dO V^T: 14 * B * H * pairs * D flops, where one kernel that adds dq across programs
needs 10.  (2, 16, 8192, 128) without a mask cannot beat 3.9 ms at 989 TFLOP/s.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.ops.attention.band import clamped_band
from tilewright.ops.attention.kernels.triton import tiles as tiling
from tilewright.ops.attention.kernels.triton.backward_kernel import keys_kernel, queries_kernel
from tilewright.ops.attention.kernels.triton.tiles import MOST_D, Tile

_keys, _queries = tiling.Looping(keys_kernel, "S_q"), tiling.Looping(queries_kernel, "S_k")


class Config(NamedTuple):
    """keys_*: the `Tile` for dk and dv; queries_*: the `Tile` for dq.   descriptors: load through TMA in both."""

    keys_m: int
    keys_n: int
    keys_warps: int
    keys_stages: int
    queries_m: int
    queries_n: int
    queries_warps: int
    queries_stages: int
    descriptors: bool


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """The tiles: dk and dv, or dq, and two tiles of scores must fit 255 registers.

    64 rows of both in four warps were the fastest for keys on an H200 at D = 128, and within 4 % for queries.
    """
    _, _, _, _, d, d_v, mask, extras, aligned = bucket
    widest, terms = max(d, d_v), tiling.has_terms(mask, extras)  # terms need registers
    if dtype.itemsize == 4 and terms:
        return Config(16, 16, 4, 1, 32, 16, 4, 1, False) if widest <= 32 else Config(16, 16, 4, 2, 16, 32, 4, 2, False)
    if dtype.itemsize == 4:
        return Config(16, 32, 8, 2, 32, 16, 8, 2, False)
    if not aligned:
        return Config(32, 64 if widest <= 128 else 32, 8, 2, 64, 32, 8, 2, False)
    if widest <= 128:
        queries = 32 if widest > 64 and terms else 64
        return Config(queries, 64, 4, 2, 64, 64, 4, 2, True)
    return Config(32, 64, 8, 2, 64, 64, 8, 2, True)


CONFIGS = tuple(
    dict.fromkeys(
        configure((32, 1, 8192, 8192, d, d, 1, extras, aligned), dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for d in (64, 128, 256)
        for extras in (0, tiling.SOFTCAP)
        for aligned in (0, 1)
    )
)


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Tiles of both kernels that compile for sm_90 with no spills, or with few."""
    d, d_v, aligned = bucket[4], bucket[5], bool(bucket[8])
    widest = max(d, d_v)
    if dtype.itemsize == 4 or not aligned:
        return (configure(bucket, dtype),)
    keys: tuple[tuple[int, int, int, int], ...]
    queries: tuple[tuple[int, int, int, int], ...]
    if widest <= 64:
        keys = ((64, 64, 4, 2), (64, 128, 8, 2))
        queries = ((64, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3))
    elif widest <= 128:
        keys = ((64, 64, 4, 2), (32, 64, 4, 2), (64, 128, 8, 2))
        queries = ((64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2))
    else:
        keys, queries = ((32, 64, 8, 2),), ((64, 64, 8, 2), (128, 32, 8, 2))
    return tuple(Config(*k, *q, True) for k in keys for q in queries)


def why_not(do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: object) -> str | None:
    """Why this engine cannot run over these operands, or None if it can."""
    if max(q.shape[3], v.shape[3]) > MOST_D:
        return f"holds heads of up to {MOST_D} numbers"
    return "has no keys to read" if k.shape[2] == 0 else None


def backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    do: Tensor,
    delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    pe: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    means: Tensor | None = None,
) -> None:
    """dq, dk, dv as the raw op `_fmha_bwd` describes them; delta (B, H, S_q) float32; S_k >= 1.

    sinks: lse includes them.   pe: dq_pe, dk_pe, q_pe and k_pe, the last two as in the forward; dk_pe (B, H_kv, S_k,
    D_pe) float32, contiguous: the gradient of k_pe per kv head.
    means: (B, H, S_q) float32: rowsum(P * dP), which is delta + dlse without the rounding of o.
    """
    batch, heads, s_q, d = q.shape
    s_k, d_v = k.shape[2], v.shape[3]
    group = heads // k.shape[1]
    left, right = clamped_band(left, right, s_q, s_k)
    dq_pe, dk_pe, q_pe, k_pe = pe or (None,) * 4
    d_pe = 0 if k_pe is None else k_pe.shape[3]
    parts = (*tiling.parts(d), *tiling.parts(d_v), d_pe, tiling.part(d_pe))
    widths = (d, d_v, *parts, left >= 0, right >= 0, program, softcap > 0.0)
    numbers = (left, right, scale, softcap)
    resident = sum(tiling.parts(d) + tiling.parts(d_v)) + tiling.part(d_pe)
    use_descriptors = config.descriptors and tiling.has_descriptors(q)

    terms, scattered = bool(program) or softcap > 0.0 or slopes is not None, not config.descriptors
    tile = tiling.fitted(Tile(*config[:4]), q, resident, d, d_v, (64, 32), "block_m", d_pe, terms, scattered)
    copied = use_descriptors and all(tiling.describable(t) for t in (q, do, q_pe) if t is not None)
    table = tiling.table(program, mask_data, q, k, tile, "key")
    args: tuple[Any, ...] = (
        dk, dv, do, delta, q, k, v, lse, slopes, mask_data, table.counts, table.indices,
        batch, heads, group, s_q, s_k, *numbers, tiling.heads_together(q, do, 1),
        *tiling.steps(False, dk, dv), *tiling.steps(copied, do, q), *tiling.steps(False, k, v), *table.strides,
        dk_pe, q_pe, k_pe, *tiling.steps(copied, q_pe), *tiling.steps(False, k_pe),
    )  # fmt: skip
    constants: tuple[Any, ...] = (*widths, copied, tile.block_m, tile.block_n)
    tiling.launch(_keys.over(s_q), (batch * k.shape[1] * -(-s_k // tile.block_n),), args, constants, tile)

    tile = tiling.fitted(Tile(*config[4:8]), q, resident, d, d_v, (64, 64), d_pe=d_pe, terms=terms, scattered=scattered)
    copied = use_descriptors and all(tiling.describable(t) for t in (k, v, k_pe) if t is not None)
    table = tiling.table(program, mask_data, q, k, tile, "query")
    args = (
        dq, means, do, delta, q, k, v, lse, slopes, mask_data, table.counts, table.indices,
        batch, heads, group, s_q, s_k, *numbers, tiling.heads_together(k, v, group),
        *tiling.steps(False, dq, do, q), *tiling.steps(copied, k, v), *table.strides,
        dq_pe, q_pe, k_pe, *tiling.steps(False, dq_pe, q_pe), *tiling.steps(copied, k_pe),
    )  # fmt: skip
    ragged = not program and s_k % tile.block_n != 0
    constants = (*widths, ragged, copied, tile.block_m, tile.block_n)
    tiling.launch(_queries.over(s_k), (batch * heads * -(-s_q // tile.block_m),), args, constants, tile)
