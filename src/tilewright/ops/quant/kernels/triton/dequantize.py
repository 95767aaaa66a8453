"""dequantize in Triton: a tile of e4m3, each scale loaded once for all elements that share it, one product an element.

Traffic: reads q and the scales, writes the result, 3.03 bytes an element to bf16: 8192x7168 cannot beat 42 us at 4.2
TB/s.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.quant.dequantize import FORWARD, DequantizeArgs, DequantizeBucket
from tilewright.ops.quant.formats import CHANNEL, GRANULARITIES, granularity
from tilewright.ops.quant.kernels.triton.numbers import as_stored, decode
from tilewright.ops.quant.layout import WHOLE
from tilewright.ops.row_grid import grid_of, row_of_grid
from tilewright.ops.rows import as_rows

GROUP = 128
_CHANNEL = GRANULARITIES.index(CHANNEL)
_FILL = 132  # programs that give every SM of an H200 one
_FEW = 1 << 17  # elements that programs of four rows would leave to a few SMs
SMALL = 1 << 22  # elements; smaller problems get small programs, so that every SM has some


class Config(NamedTuple):
    rows: int  # rows per program
    groups: int  # groups of 128 elements per row of a program
    num_warps: int
    vector: int  # adjacent elements per thread: 8 are 16 bytes of the result, 16 are 16 bytes of q


def configure(bucket: DequantizeBucket, dtype: torch.dtype) -> Config:
    m, k = bucket.M, bucket.K
    if m * k >= SMALL:  # 16 elements a thread: 43.8 us at 8192x7168, 44.8 with 32 (H200, 2026-11)
        return Config(min(m, 8), 8, num_warps=2 * min(m, 8), vector=8)
    if bucket.layout == _CHANNEL:  # 60 rows of 3072: 2.18 us, 2.53 with 8 groups, whose 45 programs are few (H100)
        groups = next((g for g in (8, 4) if m * k >= 4 * GROUP * g * _FILL), 2)
        return Config(min(m, 4), groups, num_warps=4, vector=8)
    if m * k < _FEW:  # 13 rows of 1536 1.17 us, 16 of 4096 1.20; 1.16 and 1.24 with (1, 8, 4, 8) (H200)
        return Config(min(m, 4), 2, num_warps=4, vector=8)
    # 64 rows of 4096, 7168, 14336, 16384: 1.57, 2.17, 2.40, 2.51 us; 1.65, 2.13, 2.56, 2.66 with (8, 2, 8, 8)
    return Config(min(m, 4), 8, num_warps=4, vector=8)


CONFIGS = tuple(
    dict.fromkeys(
        configure(DequantizeBucket(1 << m, 1 << k, layout=layout, out_bits=16), torch.float8_e4m3fn)
        for layout in (0, _CHANNEL)
        for m in range(15)
        for k in range(15)
    )
)


def candidates(bucket: DequantizeBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Configurations with 8 to 32 elements a thread."""
    m, k = bucket.M, bucket.K
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
    BATCHED: tl.constexpr, SCALE_ROWS: tl.constexpr, ONE_GROUP: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip  # SCALE_ROWS: rows that share a scale, 0 for all   ONE_GROUP: one scale for all columns
    # Load the groups
    index = tl.arange(0, ROWS * GROUPS)
    row_idx = row_of_grid().to(tl.int32) * ROWS + index // GROUPS
    group_idx = tl.program_id(0) * GROUPS + index % GROUPS
    group_mask = (row_idx < R) & (group_idx * 128 < K)
    offs_k = tl.max_contiguous(group_idx[:, None] * 128 + tl.arange(0, 128)[None, :], [1, VECTOR])
    mask = (row_idx[:, None] < R) & (offs_k < K)
    row_offsets = row_idx.to(tl.int64)[:, None]
    q_fp32 = decode(tl.load(q + row_offsets * stride_q + offs_k, mask=mask))  # (ROWS * GROUPS, 128)
    # Load their scales
    if BATCHED:
        scales += (row_idx // M).to(tl.int64) * step
        row_idx = row_idx % M
    if SCALE_ROWS > 0:
        scales += (row_idx // SCALE_ROWS).to(tl.int64) * scale_r
    if PACKED:
        word = tl.load(scales + group_idx // 4 * scale_k, mask=group_mask, other=0)
        exponent = (word >> (group_idx % 4 * 8)) & 255
        scale = tl.where(exponent == 255, float("nan"), (exponent << 23).to(tl.float32, bitcast=True))
    elif ONE_GROUP:
        scale = tl.load(scales + 0 * group_idx, mask=group_mask, other=0.0)
    else:
        scale = tl.load(scales + group_idx * scale_k, mask=group_mask, other=0.0)
    # Multiply and store
    tl.store(y + row_offsets * K + offs_k, (q_fp32 * scale[:, None]).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _dequantize_channels_kernel(
    y, q, scales, R, K, M, stride_q, step, scale_r, scale_k,  # scales: (batch, M / 128, K) by its strides
    BATCHED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # Load a tile
    offs_k = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    row_block, batch = row_of_grid().to(tl.int32), tl.zeros((), tl.int64)
    if BATCHED:
        row_blocks = tl.cdiv(M, ROWS)
        batch = (row_block // row_blocks).to(tl.int64)
        row_block = row_block % row_blocks
    first_row = row_block * ROWS
    row_idx = (first_row + tl.arange(0, ROWS))[:, None]
    row_offsets = batch * M + row_idx
    mask = (row_idx < M) & (row_offsets < R) & (offs_k < K)
    q_fp32 = decode(tl.load(q + row_offsets * stride_q + offs_k, mask=mask))  # (ROWS, COLUMNS)
    # Load its row of scales
    scale_row = scales + batch * step + (first_row // 128).to(tl.int64) * scale_r  # ROWS divides 128
    scale = tl.load(scale_row + offs_k * scale_k, mask=offs_k < K, other=0.0)
    # Multiply and store
    tl.store(y + row_offsets * K + offs_k, (q_fp32 * scale).to(y.dtype.element_ty), mask=mask)


_dequantize = TritonKernel(_dequantize_kernel)
_channels = TritonKernel(_dequantize_channels_kernel)


@register_kernel(FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates)
def launch(outs: tuple[Tensor], args: DequantizeArgs, config: Config) -> None:
    layout = granularity(args.q, args.scales)
    q_rows = as_rows(args.q)
    (r, k), m = q_rows.shape, args.q.shape[-2]
    # A copy if the batch has no single stride
    scales = args.scales.flatten(0, -3) if args.scales.dim() > 3 else args.scales
    step = scales.stride(-3) if scales.dim() > 2 else 0
    values = (outs[0], as_stored(q_rows), scales, r, k, m, q_rows.stride(0), step, *scales.stride()[-2:])
    blocks_a_row = triton.cdiv(k, GROUP * config.groups)
    if layout == CHANNEL:
        grid = grid_of(blocks_a_row, r // m * triton.cdiv(m, config.rows))
        _channels(grid, values, (r > m, config.rows, GROUP * config.groups), num_warps=config.num_warps)
        return
    shape = (config.rows, config.groups, config.vector)
    constants = (r > m, layout.rows, layout.depth == WHOLE, layout.dtype == torch.int32, *shape)
    _dequantize(grid_of(blocks_a_row, triton.cdiv(r, config.rows)), values, constants, num_warps=config.num_warps)
