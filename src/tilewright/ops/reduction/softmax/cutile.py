"""Softmax in cuTile, in three forms that differ in where a row is while its maximum and sum are found.

short   A row fits in registers: one read, one write.
long    One block a row walks over it twice: forwards with a running maximum and sum in every lane, no barrier; then
        backwards, so that what was read last is still near, in L1 or L2.
split   Few long rows, as in decoding: many blocks a row leave maximum and sum of their part, a second launch scales.

Traffic: 4*M*N bytes at bf16 for the short form, so 8192x4096 cannot beat 32 us at 4.2 TB/s; the others read twice, from
L2 where the rows under way fit there (60 MB on an H200).  The backward reads dy and y and writes dx, 6*M*N.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.jit.cutile_language import ct
from tilewright.jit.cutile_launch import CutileKernel, Hints
from tilewright.jit.tape import scratch
from tilewright.ops.rows import as_rows

LOG2E = 1.4426950408889634
LOWEST = -3.4028234663852886e38  # the first maximum; -inf - -inf would be NaN
INFINITY = float("inf")
REGISTERS = 16384  # elements a block keeps as float32: 64 a thread at 8 warps, the most there are
HELD = 32768  # elements of all the blocks on an SM, which has two registers for each
SPLIT_ROWS = 64  # from here on, one block a row fills half of an H200


class Config(NamedTuple):
    rows: int = 1  # short: of one block
    num_warps: int = 8  # 4 or 8
    occupancy: int = 0  # blocks that shall share an SM; 0: as tileiras chooses
    steps: int = 0  # long: 16-byte vectors a thread takes in one step along the row; 0: the row is held or split
    split: int = 0  # elements a block takes of a row that is divided among blocks, a power of two; 0: it is not


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _short(n: int, held: int) -> Config:
    block = next_power_of_2(n)
    return Config(rows=max(1, min(32, 2048 // block)), num_warps=8 if block > held // 4 else 4)


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    m, n = bucket
    if n <= REGISTERS:
        return _short(n, REGISTERS)
    return Config(steps=4) if m > SPLIT_ROWS else Config(num_warps=4, split=1024 if m <= 2 else 4096)


def configure_backward(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    held = REGISTERS // 2  # of dy and of y
    return _short(bucket[1], held) if bucket[1] <= held else Config(steps=4)


_WIDTHS = tuple(1 << k for k in range(17))
CONFIGS = tuple(dict.fromkeys(configure((m, n), torch.bfloat16) for n in _WIDTHS for m in (1, 8, 4096)))
BACKWARD_CONFIGS = tuple(dict.fromkeys(configure_backward((4096, n), torch.bfloat16) for n in _WIDTHS))


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Short rows from 8 to 64 values a thread, long ones by the size of a step or of a part."""
    m, n = bucket
    if n <= REGISTERS:
        return _short_candidates(m, next_power_of_2(n), 1)
    if m > SPLIT_ROWS:
        return _long_candidates()
    return tuple(Config(num_warps=w, split=s) for w in (4, 8) for s in (1024, 2048, 4096, 8192))


def candidates_backward(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
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
    offs_m = (ct.bid(0) * ROWS + ct.arange(ROWS, dtype=ct.int32))[:, None]
    at = (offs_m, ct.arange(BLOCK_N, dtype=ct.int32)[None, :])
    row = ct.gather(x, at, padding_value=-INFINITY, check_bounds=not EXACT).astype(ct.float32)
    top = ct.maximum(ct.max(row, axis=1, keepdims=True), LOWEST)
    e = _exp(row - top, y.dtype == ct.float32)
    result = e * (1.0 / ct.sum(e, axis=1, keepdims=True))
    ct.scatter(y, at, result.astype(y.dtype), check_bounds=not EXACT)


def _softmax_long_kernel(
    y, x,  # (M, N)
    STEPS: ct.Constant[int], LANES: ct.Constant[int],
):  # fmt: skip
    # Lanes lie across the block's threads, so maxima and sums over dimension 0 need no other thread.
    row = ct.bid(0)
    offs = ct.arange(STEPS, dtype=ct.int32)[:, None] * LANES + ct.arange(LANES, dtype=ct.int32)[None, :]
    top = ct.full((1, LANES), LOWEST, ct.float32)
    total = ct.zeros((1, LANES), ct.float32)
    blocks = ct.cdiv(x.shape[1], STEPS * LANES)
    for block in range(blocks):
        at = (row, block * (STEPS * LANES) + offs)
        part = ct.gather(x, at, padding_value=-INFINITY).astype(ct.float32)
        higher = ct.maximum(top, ct.max(part, axis=0, keepdims=True))
        e = _exp(part - higher, y.dtype == ct.float32)
        total = total * _exp(top - higher, y.dtype == ct.float32) + ct.sum(e, axis=0, keepdims=True)
        top = higher
    highest = ct.max(top, axis=1, keepdims=True)
    scale = 1.0 / ct.sum(total * _exp(top - highest, y.dtype == ct.float32), axis=1, keepdims=True)
    for back in range(blocks):
        at = (row, (blocks - 1 - back) * (STEPS * LANES) + offs)
        part = ct.gather(x, at).astype(ct.float32)
        result = _exp(part - highest, y.dtype == ct.float32) * scale
        ct.scatter(y, at, result.astype(y.dtype))


def _softmax_part_kernel(
    tops, totals, x,  # tops, totals: (M, parts)   x: (M, N)
    BLOCK_N: ct.Constant[int],
):  # fmt: skip
    row, part = ct.bid(0) // tops.shape[1], ct.bid(0) % tops.shape[1]
    offs_n = part * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32)
    values = ct.gather(x, (row, offs_n), padding_value=-INFINITY).astype(ct.float32)
    top = ct.maximum(ct.max(values), LOWEST)
    ct.scatter(tops, (row, part), top)
    ct.scatter(totals, (row, part), ct.sum(_exp(values - top, x.dtype == ct.float32)))


def _softmax_scale_kernel(
    y, tops, totals, x,  # x, y: (M, N)   tops, totals: (M, parts)
    PARTS: ct.Constant[int], BLOCK_N: ct.Constant[int],
):  # fmt: skip
    row, part = ct.bid(0) // tops.shape[1], ct.bid(0) % tops.shape[1]
    at = (row, part * BLOCK_N + ct.arange(BLOCK_N, dtype=ct.int32))
    values = ct.gather(x, at).astype(ct.float32)
    offs_p = ct.arange(PARTS, dtype=ct.int32)
    top = ct.gather(tops, (row, offs_p), padding_value=LOWEST)
    total = ct.gather(totals, (row, offs_p))
    highest = ct.max(top)
    scale = 1.0 / ct.sum(total * _exp(top - highest, x.dtype == ct.float32))
    ct.scatter(y, at, (_exp(values - highest, x.dtype == ct.float32) * scale).astype(y.dtype))


def _softmax_backward_kernel(
    dx, dy, y,  # (M, N)
    ROWS: ct.Constant[int], BLOCK_N: ct.Constant[int], EXACT: ct.Constant[bool],
):  # fmt: skip
    offs_m = (ct.bid(0) * ROWS + ct.arange(ROWS, dtype=ct.int32))[:, None]
    at = (offs_m, ct.arange(BLOCK_N, dtype=ct.int32)[None, :])
    p = ct.gather(y, at, check_bounds=not EXACT).astype(ct.float32)
    g = ct.gather(dy, at, check_bounds=not EXACT).astype(ct.float32)
    result = p * (g - ct.sum(p * g, axis=1, keepdims=True))
    ct.scatter(dx, at, result.astype(dx.dtype), check_bounds=not EXACT)


def _softmax_backward_long_kernel(
    dx, dy, y,  # (M, N)
    STEPS: ct.Constant[int], LANES: ct.Constant[int],
):  # fmt: skip
    row = ct.bid(0)
    offs = ct.arange(STEPS, dtype=ct.int32)[:, None] * LANES + ct.arange(LANES, dtype=ct.int32)[None, :]
    products = ct.zeros((STEPS, LANES), ct.float32)
    blocks = ct.cdiv(y.shape[1], STEPS * LANES)
    for block in range(blocks):
        at = (row, block * (STEPS * LANES) + offs)
        products = products + ct.gather(y, at).astype(ct.float32) * ct.gather(dy, at).astype(ct.float32)
    mean = ct.sum(products)
    for back in range(blocks):
        at = (row, (blocks - 1 - back) * (STEPS * LANES) + offs)
        p, g = ct.gather(y, at).astype(ct.float32), ct.gather(dy, at).astype(ct.float32)
        ct.scatter(dx, at, (p * (g - mean)).astype(dx.dtype))


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


@register_impl(
    "softmax", backend="cutile", configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates
)
def launch(outs: tuple[Tensor], x: Tensor, *, config: Config) -> None:
    x = as_rows(x)
    m, n = x.shape
    y = outs[0].view(m, n)
    if config.split:
        hints = Hints(config.num_warps, config.occupancy or None)
        parts = -(-n // config.split)
        tops, totals = (scratch((m, parts), torch.float32, x.device) for _ in range(2))
        _part((m * parts,), (tops, totals, x), (config.split,), hints)
        _scale((m * parts,), (y, tops, totals, x), (next_power_of_2(parts), config.split), hints)
    else:
        _short_or_long(_short_forward, _long_forward, (y, x), config)


@register_impl(
    "softmax",
    backend="cutile",
    direction="bwd",
    configure=configure_backward,
    config_type=Config,
    configs=BACKWARD_CONFIGS,
    candidates=candidates_backward,
)
def launch_backward(outs: tuple[Tensor], dy: Tensor, y: Tensor, *, config: Config) -> None:
    dy, y = as_rows(dy), as_rows(y)
    _short_or_long(_short_backward, _long_backward, (outs[0].view(y.shape), dy, y), config)
