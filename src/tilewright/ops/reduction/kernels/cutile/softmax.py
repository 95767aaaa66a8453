"""Softmax in cuTile, in three forms that differ in where a row is kept while its maximum and sum are computed.

short   A row fits in registers: one read, one write.
long    One block a row reads it twice: forwards with a running maximum and sum in every lane, without a barrier; then
        backwards, so that the elements read last are still in L1 or L2.
split   Few long rows, as in decoding: many blocks a row write maximum and sum of their part, a second launch scales.

Traffic: 4*M*N bytes at bf16 for the short form, so 8192x4096 cannot beat 32 us at 4.2 TB/s; the others read twice, from
L2 if the active rows fit there (60 MB on an H200).  The backward reads dy and y and writes dx, 6*M*N.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.cutile_language import ct
from tilewright.jit.cutile_launch import CutileKernel, Hints
from tilewright.jit.tape import scratch
from tilewright.ops.reduction.softmax import BACKWARD, FORWARD, SoftmaxArgs, SoftmaxBackwardArgs
from tilewright.ops.rows import RowsBucket, as_rows

LOG2E = 1.4426950408889634
LOWEST = -3.4028234663852886e38  # initial maximum; -inf would give -inf - -inf = NaN
INFINITY = float("inf")
REGISTERS = 16384  # float32 elements that a block holds: 64 a thread at 8 warps, the most there are
HELD = 32768  # elements that the blocks of one SM hold: two registers for each
SPLIT_ROWS = 64  # from here on, one block a row fills half of an H200


class Config(NamedTuple):
    rows: int = 1  # short: rows per block
    num_warps: int = 8  # 4 or 8
    occupancy: int = 0  # blocks per SM; 0: tileiras chooses
    steps: int = 0  # long: 16-byte vectors per thread in one step of the loop; 0: short or split
    split: int = 0  # elements per block of a row that several blocks share, a power of two; 0: one block a row


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _short(n: int, held: int) -> Config:
    block = next_power_of_2(n)
    return Config(rows=max(1, min(32, 2048 // block)), num_warps=8 if block > held // 4 else 4)


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    m, n = bucket
    if n <= REGISTERS:
        return _short(n, REGISTERS)
    return Config(steps=4) if m > SPLIT_ROWS else Config(num_warps=4, split=1024 if m <= 2 else 4096)


def configure_backward(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    _, n = bucket
    held = REGISTERS // 2  # elements of dy and as many of y
    return _short(n, held) if n <= held else Config(steps=4)


_WIDTHS = tuple(1 << k for k in range(17))
CONFIGS = tuple(dict.fromkeys(configure(RowsBucket(m, n), torch.bfloat16) for n in _WIDTHS for m in (1, 8, 4096)))
BACKWARD_CONFIGS = tuple(dict.fromkeys(configure_backward(RowsBucket(4096, n), torch.bfloat16) for n in _WIDTHS))


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Short rows with 8 to 64 elements a thread, long ones by the size of a step or of a part."""
    m, n = bucket
    if n <= REGISTERS:
        return _short_candidates(m, next_power_of_2(n), 1)
    if m > SPLIT_ROWS:
        return _long_candidates()
    return tuple(Config(num_warps=w, split=s) for w in (4, 8) for s in (1024, 2048, 4096, 8192))


def candidates_backward(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    m, n = bucket
    return _short_candidates(m, next_power_of_2(n), 2) if n <= REGISTERS // 2 else _long_candidates()


def _short_candidates(m: int, block: int, tensors: int) -> tuple[Config, ...]:
    return tuple(
        Config(rows, warps, occupancy)
        for warps in (4, 8)
        for rows in (1, 2, 4, 8, 16, 32)
        for occupancy in (0, 4, 8)
        if rows == 1 or (rows <= m and 8 * 32 * warps <= rows * block)
        if rows * block * tensors <= 64 * 32 * warps and rows * block * tensors * max(1, occupancy) <= HELD
    )


def _long_candidates() -> tuple[Config, ...]:
    return tuple(
        Config(num_warps=warps, occupancy=occupancy, steps=steps)
        for warps in (4, 8)
        for steps in (2, 4, 8)
        for occupancy in (0, 2, 4)
        if warps * steps * occupancy <= 64  # more spills: a step of half types holds 8 values a vector, twice
    )


def _exp(x, PRECISE):
    """e^x; the fast form, for results that are rounded to a half type, has a relative error of |x| * 2^-24."""
    if PRECISE:
        result = ct.exp(x)
    else:
        result = ct.exp2(x * LOG2E, flush_to_zero=True)
    return result


def _softmax_kernel(
    y, x,  # (M, N)
    ROWS: ct.Constant[int], BLOCK_N: ct.Constant[int], EXACT: ct.Constant[bool],
):  # fmt: skip  # EXACT: nothing needs a mask
    """y = exp(x - max(x)) / sum(exp(x - max(x))), the short form."""
    row_idx = (ct.bid(0) * ROWS + ct.arange(ROWS, dtype=ct.int32))[:, None]
    index = (row_idx, ct.arange(BLOCK_N, dtype=ct.int32)[None, :])
    x_fp32 = ct.gather(x, index, padding_value=-INFINITY, check_bounds=not EXACT).astype(ct.float32)
    m_i = ct.maximum(ct.max(x_fp32, axis=1, keepdims=True), LOWEST)
    e = _exp(x_fp32 - m_i, y.dtype == ct.float32)
    y_fp32 = e * (1.0 / ct.sum(e, axis=1, keepdims=True))
    ct.scatter(y, index, y_fp32.astype(y.dtype), check_bounds=not EXACT)


def _softmax_long_kernel(
    y, x,  # (M, N)
    STEPS: ct.Constant[int], LANES: ct.Constant[int],
):  # fmt: skip
    """y as above, the long form."""
    # Dimension 1 is spread over the threads: maxima and sums over dimension 0 stay in a thread.
    row_idx = ct.bid(0)
    offs = ct.arange(STEPS, dtype=ct.int32)[:, None] * LANES + ct.arange(LANES, dtype=ct.int32)[None, :]
    m_i = ct.full((1, LANES), LOWEST, ct.float32)
    l_i = ct.zeros((1, LANES), ct.float32)
    blocks = ct.cdiv(x.shape[1], STEPS * LANES)
    # First pass: running maximum and sum in every lane
    for block in range(blocks):
        index = (row_idx, block * (STEPS * LANES) + offs)
        part = ct.gather(x, index, padding_value=-INFINITY).astype(ct.float32)
        m_new = ct.maximum(m_i, ct.max(part, axis=0, keepdims=True))
        e = _exp(part - m_new, y.dtype == ct.float32)
        l_i = l_i * _exp(m_i - m_new, y.dtype == ct.float32) + ct.sum(e, axis=0, keepdims=True)
        m_i = m_new
    # Combine the lanes
    row_max = ct.max(m_i, axis=1, keepdims=True)
    scale = 1.0 / ct.sum(l_i * _exp(m_i - row_max, y.dtype == ct.float32), axis=1, keepdims=True)
    # Second pass, backwards: scale and store
    for back in range(blocks):
        index = (row_idx, (blocks - 1 - back) * (STEPS * LANES) + offs)
        part = ct.gather(x, index).astype(ct.float32)
        y_fp32 = _exp(part - row_max, y.dtype == ct.float32) * scale
        ct.scatter(y, index, y_fp32.astype(y.dtype))


def _softmax_part_kernel(
    maxima, sums, x,  # maxima, sums: (M, parts)   x: (M, N)
    BLOCK_N: ct.Constant[int],
):  # fmt: skip
    """Maximum and sum of exponentials of one part of a row."""
    row_idx, part = ct.bid(0) // maxima.shape[1], ct.bid(0) % maxima.shape[1]
    col_offsets = part * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32)
    x_fp32 = ct.gather(x, (row_idx, col_offsets), padding_value=-INFINITY).astype(ct.float32)
    m_i = ct.maximum(ct.max(x_fp32), LOWEST)
    ct.scatter(maxima, (row_idx, part), m_i)
    ct.scatter(sums, (row_idx, part), ct.sum(_exp(x_fp32 - m_i, x.dtype == ct.float32)))


def _softmax_scale_kernel(
    y, maxima, sums, x,  # x, y: (M, N)   maxima, sums: (M, parts)
    PARTS: ct.Constant[int], BLOCK_N: ct.Constant[int],
):  # fmt: skip
    """y of one part of a row, from maxima and sums of all its parts."""
    # Load the part
    row_idx, part = ct.bid(0) // maxima.shape[1], ct.bid(0) % maxima.shape[1]
    index = (row_idx, part * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32))
    x_fp32 = ct.gather(x, index).astype(ct.float32)
    # Combine maxima and sums of the parts
    offs_p = ct.arange(PARTS, dtype=ct.int32)
    m_i = ct.gather(maxima, (row_idx, offs_p), padding_value=LOWEST)
    l_i = ct.gather(sums, (row_idx, offs_p))
    row_max = ct.max(m_i)
    scale = 1.0 / ct.sum(l_i * _exp(m_i - row_max, x.dtype == ct.float32))
    ct.scatter(y, index, (_exp(x_fp32 - row_max, x.dtype == ct.float32) * scale).astype(y.dtype))


def _softmax_backward_kernel(
    dx, dy, y,  # (M, N)
    ROWS: ct.Constant[int], BLOCK_N: ct.Constant[int], EXACT: ct.Constant[bool],
):  # fmt: skip
    """dx = y * (dy - dot(dy, y)), the dot product over each row; the short form."""
    row_idx = (ct.bid(0) * ROWS + ct.arange(ROWS, dtype=ct.int32))[:, None]
    index = (row_idx, ct.arange(BLOCK_N, dtype=ct.int32)[None, :])
    y_fp32 = ct.gather(y, index, check_bounds=not EXACT).astype(ct.float32)
    dy_fp32 = ct.gather(dy, index, check_bounds=not EXACT).astype(ct.float32)
    dx_fp32 = y_fp32 * (dy_fp32 - ct.sum(y_fp32 * dy_fp32, axis=1, keepdims=True))
    ct.scatter(dx, index, dx_fp32.astype(dx.dtype), check_bounds=not EXACT)


def _softmax_backward_long_kernel(
    dx, dy, y,  # (M, N)
    STEPS: ct.Constant[int], LANES: ct.Constant[int],
):  # fmt: skip
    """dx as above, the long form."""
    # First pass: the dot product
    row_idx = ct.bid(0)
    offs = ct.arange(STEPS, dtype=ct.int32)[:, None] * LANES + ct.arange(LANES, dtype=ct.int32)[None, :]
    products = ct.zeros((STEPS, LANES), ct.float32)
    blocks = ct.cdiv(y.shape[1], STEPS * LANES)
    for block in range(blocks):
        index = (row_idx, block * (STEPS * LANES) + offs)
        products = products + ct.gather(y, index).astype(ct.float32) * ct.gather(dy, index).astype(ct.float32)
    dot = ct.sum(products)
    # Second pass, backwards: dx
    for back in range(blocks):
        index = (row_idx, (blocks - 1 - back) * (STEPS * LANES) + offs)
        y_fp32, dy_fp32 = ct.gather(y, index).astype(ct.float32), ct.gather(dy, index).astype(ct.float32)
        ct.scatter(dx, index, (y_fp32 * (dy_fp32 - dot)).astype(dx.dtype))


_short_forward = CutileKernel(_softmax_kernel)
_long_forward = CutileKernel(_softmax_long_kernel)
_part = CutileKernel(_softmax_part_kernel)
_scale = CutileKernel(_softmax_scale_kernel)
_short_backward = CutileKernel(_softmax_backward_kernel)
_long_backward = CutileKernel(_softmax_backward_long_kernel)


def _short_or_long(short: CutileKernel, long: CutileKernel, tensors: tuple[Tensor, ...], config: Config) -> None:
    m, n = tensors[0].shape
    hints = Hints(config.num_warps, config.occupancy or None)
    if config.steps:
        lanes = config.num_warps * 32 * 16 // tensors[-1].element_size()  # one 16-byte vector for each thread
        long((m,), tensors, (config.steps, lanes), hints)
    else:
        block = next_power_of_2(n)
        constants = (config.rows, block, n == block and m % config.rows == 0)
        short((-(-m // config.rows),), tensors, constants, hints)


@register_kernel(FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates)
def launch(outs: tuple[Tensor], args: SoftmaxArgs, config: Config) -> None:
    x = as_rows(args.x)
    m, n = x.shape
    y = outs[0].view(m, n)
    if config.split:
        hints = Hints(config.num_warps, config.occupancy or None)
        parts = -(-n // config.split)
        maxima, sums = (scratch((m, parts), torch.float32, x.device) for _ in range(2))
        _part((m * parts,), (maxima, sums, x), (config.split,), hints)
        _scale((m * parts,), (y, maxima, sums, x), (next_power_of_2(parts), config.split), hints)
    else:
        _short_or_long(_short_forward, _long_forward, (y, x), config)


@register_kernel(
    BACKWARD,
    configure=configure_backward,
    config_type=Config,
    configs=BACKWARD_CONFIGS,
    candidates=candidates_backward,
)
def launch_backward(outs: tuple[Tensor], args: SoftmaxBackwardArgs, config: Config) -> None:
    dy, y = as_rows(args.dy), as_rows(args.y)
    _short_or_long(_short_backward, _long_backward, (outs[0].view(y.shape), dy, y), config)
