"""dequantize in Triton: a tile of e4m3, its scales fetched once for all elements that share them, one product each.

Traffic: reads q and the scales, writes the result, 3.03 bytes an element to bf16: 8192x7168 cannot beat 42 us at 4.2
TB/s.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.quant.formats import CHANNEL, granularity
from tilewright.ops.quant.layout import WHOLE
from tilewright.ops.quant.triton_numbers import as_stored, decode
from tilewright.ops.rows import as_rows

GROUP = 128
SMALL = 1 << 22  # elements, below which programs are made small, so that there are some for every SM


class Config(NamedTuple):
    rows: int  # of one program
    groups: int  # of 128 elements, of each row
    num_warps: int
    vector: int  # neighbours of a thread: 8 are 16 bytes of the result, 16 of q


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    m, k, *_ = bucket
    if m * k >= SMALL:  # 16 elements a thread: 43.8 us at 8192x7168, 44.8 with 32 (H200, 2026-11)
        return Config(min(m, 8), 8, num_warps=2 * min(m, 8), vector=8)
    # 64 rows of 4096, 7168, 14336, 16384: 1.57, 2.17, 2.40, 2.51 us; 1.65, 2.13, 2.56, 2.66 with (8, 2, 8, 8)
    return Config(min(m, 4), 8, num_warps=4, vector=8)


CONFIGS = tuple(
    dict.fromkeys(configure((1 << m, 1 << k, 0, 16), torch.float8_e4m3fn) for m in range(15) for k in range(15))
)


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """From 8 to 32 elements a thread."""
    m, k, *_ = bucket
    sizes = ((r, g, 128 * r * g) for r in (1, 4, 8, 16) for g in (1, 2, 4, 8) if r <= m and (g == 1 or 128 * g < 2 * k))
    return tuple(
        Config(r, g, w, v)
        for r, g, size in sizes
        for w in (2, 4, 8, 16)
        for v in (8, 16)
        if v <= size // (32 * w) <= 32
    )


@triton.jit
def _dequantize_kernel(
    y, q, scales, R, K, M, stride_q, step, scale_r, scale_k,  # y, q: (R, K), R = batch * M   scales: by its strides
    BATCHED: tl.constexpr, TALL: tl.constexpr, DEEP: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip  # TALL: rows that share a scale, 0 for all   DEEP: do the 128 elements of a group share one with others
    across = tl.cdiv(K, 128 * GROUPS)
    index = tl.arange(0, ROWS * GROUPS)
    r = tl.program_id(0) // across * ROWS + index // GROUPS
    g = tl.program_id(0) % across * GROUPS + index % GROUPS
    keep = (r < R) & (g * 128 < K)
    offs_k = tl.max_contiguous(g[:, None] * 128 + tl.arange(0, 128)[None, :], [1, VECTOR])
    mask = (r[:, None] < R) & (offs_k < K)
    at = r.to(tl.int64)[:, None]
    values = decode(tl.load(q + at * stride_q + offs_k, mask=mask))  # (ROWS * GROUPS, 128)
    if BATCHED:
        scales += (r // M).to(tl.int64) * step
        r = r % M
    if TALL > 0:
        scales += (r // TALL).to(tl.int64) * scale_r
    if PACKED:
        word = tl.load(scales + g // 4 * scale_k, mask=keep, other=0)
        exponent = (word >> (g % 4 * 8)) & 255
        scale = tl.where(exponent == 255, float("nan"), (exponent << 23).to(tl.float32, bitcast=True))
    elif DEEP:
        scale = tl.load(scales + 0 * g, mask=keep, other=0.0)
    else:
        scale = tl.load(scales + g * scale_k, mask=keep, other=0.0)
    tl.store(y + at * K + offs_k, (values * scale[:, None]).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _dequantize_channels_kernel(
    y, q, scales, R, K, M, stride_q, step, scale_r, scale_k,  # scales: (batch, M / 128, K) by its strides
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across, down = tl.cdiv(K, COLUMNS), tl.cdiv(M, ROWS)
    offs_k = (tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    first = tl.program_id(0) // across % down * ROWS
    batch = (tl.program_id(0) // (across * down)).to(tl.int64)
    offs_m = (first + tl.arange(0, ROWS))[:, None]
    at = batch * M + offs_m
    mask = (offs_m < M) & (offs_k < K)
    values = decode(tl.load(q + at * stride_q + offs_k, mask=mask))  # (ROWS, COLUMNS)
    line = scales + batch * step + (first // 128).to(tl.int64) * scale_r  # ROWS divides 128
    scale = tl.load(line + offs_k * scale_k, mask=offs_k < K, other=0.0)
    tl.store(y + at * K + offs_k, (values * scale).to(y.dtype.element_ty), mask=mask)


_dequantize = TritonKernel(_dequantize_kernel)
_channels = TritonKernel(_dequantize_channels_kernel)


@register_impl(
    "dequantize",
    backend="triton",
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
)
def launch(outs: tuple[Tensor], q: Tensor, scales: Tensor, dtype: torch.dtype, *, config: Config) -> None:
    layout = granularity(q, scales)
    rows = as_rows(q)
    (r, k), m = rows.shape, q.shape[-2]
    scales = scales.flatten(0, -3) if scales.dim() > 3 else scales  # a copy where no one stride leads through the batch
    step = scales.stride(-3) if scales.dim() > 2 else 0
    args = (outs[0], as_stored(rows), scales, r, k, m, rows.stride(0), step, *scales.stride()[-2:])
    across = triton.cdiv(k, GROUP * config.groups)
    if layout == CHANNEL:
        grid = (r // m * triton.cdiv(m, config.rows) * across,)
        _channels(grid, args, (config.rows, GROUP * config.groups), num_warps=config.num_warps)
        return
    constants = (
        r > m,
        layout.rows,
        layout.depth == WHOLE,
        layout.dtype == torch.int32,
        config.rows,
        config.groups,
        config.vector,
    )
    _dequantize((triton.cdiv(r, config.rows) * across,), args, constants, num_warps=config.num_warps)
