"""logsumexp in Triton: a row is read once, by one program, by several, or many rows by one.

short   Many rows a program, one tile.
long    A running maximum and sum in every lane, without a barrier before the end of the row.  Rows that begin between
        two 16-byte boundaries are divided into head, body and tail as `ops/unaligned_rows.py` says.
split   Few long rows: several programs a row write maximum and sum of their part, a second launch joins them.

Maxima stay finite: of +inf it is exp(inf - max) that becomes inf, and so the sum.
Backward: dx = dy * exp(x - lse), element by element.

Traffic: forward 2*M*N bytes at bf16, so 4096x128256 cannot beat 250 us at 4.2 TB/s; backward 4*M*N, 500 us.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.exponential import exp, log
from tilewright.ops.reduction.kernels.triton.packed_rows import LOWEST
from tilewright.ops.reduction.logsumexp import BACKWARD, FORWARD, LogsumexpArgs, LogsumexpBackwardArgs
from tilewright.ops.row_grid import grid_of, row_of_grid
from tilewright.ops.rows import RowsBucket, as_rows
from tilewright.ops.unaligned_rows import body_of, edge_columns, lengths, unaligned

SHORT = 1024  # elements of a row up to which it is one tile
SPLIT_ROWS = 64  # from here on, one program a row fills half of an H200


class Config(NamedTuple):
    num_warps: int
    rows: int = 1  # short: rows per program
    steps: int = 4  # long: 16-byte vectors per thread in one step of the loop
    split: int = 0  # elements per program of a row that several programs share; 0: one program a row


class TileConfig(NamedTuple):
    block: int  # columns of a program
    num_warps: int


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    m, n = bucket
    if n <= SHORT:
        return Config(num_warps=4, rows=max(1, min(32, 2048 // triton.next_power_of_2(n))))
    return Config(num_warps=4, split=8192 if m <= SPLIT_ROWS and n > 8192 else 0)


def configure_backward(bucket: RowsBucket, dtype: torch.dtype) -> TileConfig:
    return TileConfig(min(triton.next_power_of_2(bucket.N), 1024), num_warps=1)


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    m, n = bucket
    if n <= SHORT:
        return tuple(Config(warps, rows) for warps in (1, 2, 4, 8) for rows in (1, 2, 4, 8, 16, 32))
    long = tuple(Config(warps, steps=steps) for warps in (1, 2, 4, 8, 16) for steps in (1, 2, 4, 8))
    if m > 2 * SPLIT_ROWS:
        return long
    split = tuple(
        Config(warps, steps=steps, split=split)
        for split in (2048, 4096, 8192, 16384)
        for warps in (2, 4, 8)
        for steps in (1, 2, 4)
        if split < n and 512 * warps * steps <= split * dtype.itemsize  # a part is a step of the loop or longer
    )
    return (*long, *split)


def candidates_backward(bucket: RowsBucket, dtype: torch.dtype) -> tuple[TileConfig, ...]:
    return tuple(
        TileConfig(block, warps)
        for block in (256, 512, 1024, 2048, 4096)
        for warps in (1, 2, 4, 8)
        if block < 2 * bucket.N and 4 <= block // (32 * warps) <= 64
    )


_SIZES = tuple(RowsBucket(m, 1 << k) for k in range(18) for m in (1, 4096))
CONFIGS = tuple(dict.fromkeys(configure(size, torch.bfloat16) for size in _SIZES))
BACKWARD_CONFIGS = tuple(dict.fromkeys(configure_backward(size, torch.bfloat16) for size in _SIZES))


@triton.jit
def _finite_max(m_i, other):
    return tl.minimum(tl.maximum(m_i, other), -LOWEST)


@triton.jit
def _logsumexp_kernel(y, lse, x, M, N, stride_x, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):  # y, lse: (M,)
    """y = lse = max(x) + log(sum(exp(x - max(x)))), the short form."""
    PRECISE: tl.constexpr = x.dtype.element_ty == tl.float32
    row_idx, offs = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_N)[None, :]
    mask = (row_idx[:, None] < M) & (offs < N)
    part = tl.load(x + row_idx[:, None].to(tl.int64) * stride_x + offs, mask=mask, other=float("-inf")).to(tl.float32)
    m_i = _finite_max(tl.max(part, 1), LOWEST)
    value = m_i + log(tl.sum(exp(part - m_i[:, None], PRECISE), 1))
    tl.store(lse + row_idx, value, mask=row_idx < M)
    tl.store(y + row_idx, value.to(y.dtype.element_ty), mask=row_idx < M)


@triton.jit
def _logsumexp_long_kernel(
    y, lse, maxima, sums, x, N, parts, stride_x,  # y, lse: (M,), maxima, sums: (M, parts)
    PART: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """y and lse of a row; or, if PART is not 0, maximum and sum of exponentials of so many elements of its body."""
    PRECISE: tl.constexpr = x.dtype.element_ty == tl.float32
    VECTOR: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth  # elements in 16 bytes
    # Dimension 1 is spread over the threads: maxima and sums over dimension 0 stay in a thread.
    offs = tl.arange(0, STEPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    row_idx, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    x_start = row_idx.to(tl.int64) * stride_x
    head, body, x_ptr = 0, N, x + x_start
    if UNALIGNED:
        head, body = lengths(x_start, N, VECTOR)
        x_ptr = x + body_of(x_start, VECTOR)
    first, end = 0, body
    if PART:
        first = part * PART
        end = tl.minimum(body, first + PART)

    # Running maximum and sum in every lane
    m_i = tl.full((LANES,), LOWEST, tl.float32)
    l_i = tl.zeros((LANES,), tl.float32)
    for start in tl.range(first, end, STEPS * LANES):
        tile = tl.load(
            x_ptr + start + offs, mask=offs < end - start, other=float("-inf"), eviction_policy="evict_first"
        )
        tile = tile.to(tl.float32)
        m_new = _finite_max(m_i, tl.max(tile, 0))
        l_i = l_i * exp(m_i - m_new, PRECISE) + tl.sum(exp(tile - m_new[None, :], PRECISE), 0)
        m_i = m_new
    # Combine the lanes, and the edges of the row
    row_max = tl.max(m_i, 0)
    total = tl.sum(l_i * exp(m_i - row_max, PRECISE), 0)
    if UNALIGNED:
        edge_offs, edge_mask = edge_columns(head, body, N, VECTOR)
        edge = tl.load(x + x_start + edge_offs, mask=edge_mask & (part == 0), other=float("-inf")).to(tl.float32)
        m_new = _finite_max(row_max, tl.max(edge, 0))
        total = total * exp(row_max - m_new, PRECISE) + tl.sum(exp(edge - m_new, PRECISE), 0)
        row_max = m_new
    if PART:
        tl.store(maxima + tl.program_id(0), row_max)
        tl.store(sums + tl.program_id(0), total)
    else:
        value = row_max + log(total)
        tl.store(lse + row_idx, value)
        tl.store(y + row_idx, value.to(y.dtype.element_ty))


@triton.jit
def _logsumexp_join_kernel(y, lse, maxima, sums, parts, PARTS: tl.constexpr):  # maxima, sums: (M, parts)
    """y and lse of a row from maxima and sums of its parts."""
    offs = tl.arange(0, PARTS)
    m_i = tl.load(maxima + tl.program_id(0) * parts + offs, mask=offs < parts, other=LOWEST)
    l_i = tl.load(sums + tl.program_id(0) * parts + offs, mask=offs < parts, other=0.0)
    row_max = tl.max(m_i, 0)
    value = row_max + log(tl.sum(l_i * exp(m_i - row_max, True), 0))
    tl.store(lse + tl.program_id(0), value)
    tl.store(y + tl.program_id(0), value.to(y.dtype.element_ty))


@triton.jit
def _logsumexp_backward_kernel(
    dx, x, lse, dy, M, N, stride_x,  # dx, x: (M, N), lse, dy: (M,)
    BLOCK_N: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """dx = dy * exp(x - lse) of a part of a row."""
    PRECISE: tl.constexpr = x.dtype.element_ty == tl.float32
    VECTOR: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth  # elements in 16 bytes
    row_idx = row_of_grid()
    if row_idx < M:
        offs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        value, grad = tl.load(lse + row_idx), tl.load(dy + row_idx).to(tl.float32)
        x_start, dx_start, body = row_idx * stride_x, row_idx * N, N
        x_ptr, dx_ptr = x + x_start, dx + dx_start
        if UNALIGNED:
            head, body = lengths(x_start, N, VECTOR)
            x_ptr, dx_ptr = x + body_of(x_start, VECTOR), dx + body_of(dx_start, VECTOR)
            edge_offs, edge_mask = edge_columns(head, body, N, VECTOR)
            edge_mask = edge_mask & (tl.program_id(0) == 0)
            edge = tl.load(x + x_start + edge_offs, mask=edge_mask).to(tl.float32)
            dx_edge = grad * exp(edge - value, PRECISE)
            tl.store(dx + dx_start + edge_offs, dx_edge.to(dx.dtype.element_ty), mask=edge_mask)
        tile = tl.load(x_ptr + offs, mask=offs < body).to(tl.float32)
        dx_fp32 = grad * exp(tile - value, PRECISE)
        tl.store(dx_ptr + offs, dx_fp32.to(dx.dtype.element_ty), mask=offs < body)


_short_forward = TritonKernel(_logsumexp_kernel)
_long_forward = TritonKernel(_logsumexp_long_kernel)
_join = TritonKernel(_logsumexp_join_kernel)
_backward = TritonKernel(_logsumexp_backward_kernel)


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    batch_invariant=False,
)
def launch(outs: tuple[Tensor, Tensor], args: LogsumexpArgs, config: Config) -> None:
    y, lse = outs
    x = as_rows(args.x)
    m, n = x.shape
    if n <= SHORT:
        constants = (config.rows, triton.next_power_of_2(n))
        _short_forward(
            (triton.cdiv(m, config.rows),), (y, lse, x, m, n, x.stride(0)), constants, num_warps=config.num_warps
        )
        return
    lanes = config.num_warps * 32 * 16 // x.itemsize  # one 16-byte vector for each thread
    parts = -(-n // config.split) if config.split else 1
    maxima, sums = (scratch((m, parts), torch.float32, x.device) for _ in range(2)) if config.split else (lse, lse)
    constants = (config.split, config.steps, lanes, unaligned(x))
    parameters = (y, lse, maxima, sums, x, n, parts, x.stride(0))
    _long_forward((m * parts,), parameters, constants, num_warps=config.num_warps)
    if config.split:
        _join((m,), (y, lse, maxima, sums, parts), (triton.next_power_of_2(parts),), num_warps=1)


@register_kernel(
    BACKWARD,
    configure=configure_backward,
    config_type=TileConfig,
    configs=BACKWARD_CONFIGS,
    candidates=candidates_backward,
)
def launch_backward(outs: tuple[Tensor], args: LogsumexpBackwardArgs, config: TileConfig) -> None:
    x, dx = as_rows(args.x), as_rows(outs[0])
    m, n = x.shape
    parameters = (dx, x, args.lse.contiguous(), args.dy.contiguous(), m, n, x.stride(0))
    grid = grid_of(triton.cdiv(n, config.block), m)
    _backward(grid, parameters, (config.block, unaligned(x, dx)), num_warps=config.num_warps)
