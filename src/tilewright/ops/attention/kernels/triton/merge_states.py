"""Merge of attention states in Triton, forward and backward.  A program holds some rows of the result in registers.

Forward: the maximum m of the N lse of a row and l = sum_i exp(lse_i - m); then o' = sum_i w_i o_i with
w_i = exp(lse_i - m) / l.  Backward: do_i = w_i do, dlse_i = w_i (do . o_i - sum_j w_j do . o_j + dlse'): the sum comes
first, and o_i that do not stay in registers are read again.  (do . o' would save that pass, but o' is rounded and the
difference cancels: for one state it must be 0.)

The target is the speed of a copy.  So the first state of each stack is loaded before any lse is waited for; two states
are always two stacks of one, without a loop; stores come last, because no load moves across a store that may alias; and
rows of dense tensors need no division.  On sm_90 this leaves 260 of 1570 instructions for two bf16 states.  Up to 128
bytes per thread all states are loaded together, once, also in the backward; beyond that, two at a time.

A decoding step has few rows and many states (split KV), and one state after another would be a chain of memory
latencies.  There a program has one row, or a part of one, and loads a tile of states (`merge_stack_kernel.py`): lanes
and warps share the states, each computes the weights of its states, and the sum runs over registers, then lanes, then
warps, in an order that the configuration fixes.  More states than one tile are processed tile by tile.

Traffic at bf16: forward reads N states of M * (2 * D + 4) bytes and writes one, so two states of 8192 x 32 heads with
D = 128 move 204 MB, 49 us at 4.2 TB/s; backward moves 2 * N + 1 of them, 81 us.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.attention.kernels.triton.merge_stack_kernel import merge_stack_kernel
from tilewright.ops.attention.kernels.triton.merge_states_kernel import merge_backward_kernel, merge_kernel
from tilewright.ops.attention.merge_states import BACKWARD, FORWARD
from tilewright.ops.attention.merge_states.args import MergeStatesArgs, MergeStatesBackwardArgs, MergeStatesBucket
from tilewright.ops.rows import no_float64

MANY = 4096  # rows; in tiles of 16 they are two programs per SM of an H200
WIDEST = 4096  # elements of a row; the backward has three float32 of each in registers
IN_FLIGHT = 128  # bytes of states in flight per thread: 32 registers
PROGRAMS = 128  # at least, if there are few rows: about one per SM of an H200
LINE = 128  # then at least so many bytes of a row per program: an L2 cache line


class Config(NamedTuple):
    rows: int  # of one program
    num_warps: int
    parts: int = 1  # programs per row, for a stack of three or more states


def _configure(bucket: MergeStatesBucket, dtype: torch.dtype, nbytes: int) -> Config:
    """Tiles of `nbytes` a state, a 16-byte read a thread, and at most 32 rows; for few rows, as in decoding, a tile of
    one warp, so that there are programs for every SM.
    """
    m, d = bucket.M, bucket.D
    row = triton.next_power_of_2(d) * dtype.itemsize
    rows = max(1, min(32, (nbytes if m >= MANY else 512) // row))
    return Config(rows, num_warps=max(1, min(8, rows * row // 512)))


def configure(bucket: MergeStatesBucket, dtype: torch.dtype) -> Config:
    """For few rows of three or more states one program per row or part of a row, with four 16-byte loads per thread."""
    m, d, n = bucket.M, bucket.D, bucket.N
    if n <= 2 or m >= MANY:
        return _configure(bucket, dtype, 4096 if n <= 2 else 2048)
    row, parts = triton.next_power_of_2(d) * dtype.itemsize, 1
    while m * parts < PROGRAMS and row // parts > LINE:
        parts *= 2
    tile = triton.next_power_of_2(n) * row // parts
    return Config(1, num_warps=max(1, min(8, tile // 2048)), parts=parts)


def configure_backward(bucket: MergeStatesBucket, dtype: torch.dtype) -> Config:
    return _configure(bucket, dtype, 2048)


def candidates_backward(bucket: MergeStatesBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """4 to 32 elements of a tile in each thread."""
    m, d = bucket.M, bucket.D
    block = triton.next_power_of_2(d)
    return tuple(
        Config(rows, warps)
        for rows in (1, 2, 4, 8, 16, 32)
        for warps in (1, 2, 4, 8)
        if rows <= m and 4 <= rows * block // (32 * warps) <= 32
    )


def candidates(bucket: MergeStatesBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """The same; where a program has one row, of the tile of all states."""
    d, n = bucket.D, bucket.N
    tiles = candidates_backward(bucket, dtype)
    if n <= 2:
        return tiles
    elements = triton.next_power_of_2(n) * triton.next_power_of_2(d)
    return tuple(tile for tile in tiles if tile.rows > 1) + tuple(
        Config(1, warps, parts)
        for warps in (1, 2, 4, 8)
        for parts in (1, 2, 4)
        if 4 <= elements // (32 * warps * parts) <= 32
    )


def _every(choose: Callable[[MergeStatesBucket, torch.dtype], Config], *states: int) -> tuple[Config, ...]:
    """Configs that `choose` returns for usual head dimensions."""
    sizes = [MergeStatesBucket(m, d, n) for m in (1, 256, MANY) for d in (64, 128, 256, 512) for n in states]
    return tuple(dict.fromkeys(choose(size, dtype) for size in sizes for dtype in (torch.bfloat16, torch.float32)))


_forward, _backward = TritonKernel(merge_kernel), TritonKernel(merge_backward_kernel)
_stack = TritonKernel(merge_stack_kernel)


def _split(o: Tensor, other: Tensor | None) -> bool:
    """True for one stack of two states: it runs as two stacks of one state, so that N is a constant, without a loop."""
    return other is None and o.shape[0] == 2


def _strides(t: Tensor | None) -> tuple[int, ...]:
    return (0,) * 5 if t is None else t.stride()


@functools.lru_cache(maxsize=4096)
def _numbers(
    shape: tuple[int, ...], n_other: int, single: tuple[int, ...], *stacks: tuple[int, ...]
) -> tuple[int, ...]:
    """All integers from M on that the kernels take.  shape: of o   single: strides of out or do   stacks: strides of o,
    other, lse, other_lse, and backwards of d_o, d_other.

    Dimensions that follow each other in all tensors become one, and sizes of 1 go last: dense tensors have neither H
    nor S, and no row needs a division to be found.
    """
    n, *lead, d = shape
    begins = [0] * (len(stacks) // 2)
    if n == 2 and n_other == 0:
        n, n_other, begins = 1, 1, [t[0] for t in stacks[::2]]
        stacks = tuple(t for t in stacks[::2] for _ in range(2))
    # 0 where there is no next state, so that one kernel serves all such
    steps = [t[0] if count > 1 else 0 for t, count in zip(stacks, (n, n_other) * len(begins), strict=True)]

    joined: list[tuple[int, tuple[int, ...]]] = []
    for size, *row_strides in zip(lead, single[:3], *(t[1:4] for t in stacks), strict=True):
        if (
            size > 1
            and joined
            and all(outer == size * inner for outer, inner in zip(joined[-1][1], row_strides, strict=True))
        ):
            joined[-1] = (joined[-1][0] * size, tuple(row_strides))
        elif size > 1:
            joined.append((size, tuple(row_strides)))
    joined += [(1, (0,) * (1 + len(stacks)))] * (3 - len(joined))
    (_, h, s), strides = zip(*joined, strict=True)
    by_tensor = [stride for tensor in zip(*strides, strict=True) for stride in tensor]
    return math.prod(lead), h, s, d, n, n_other, *begins, *steps, *by_tensor


def _fitting(config: Config, block: int, o: Tensor) -> int:
    """How many states of `block` columns a program may read together, IN_FLIGHT bytes a thread."""
    d, size, threads = o.shape[-1], o.element_size(), 32 * config.num_warps
    if d * size % 16:  # loaded by element, each into a separate register, under masks that take registers too
        size = 8
    return max(1, IN_FLIGHT * threads // (size * max(threads, config.rows * block)))


def _grid_and_constants(
    config: Config, numbers: tuple[int, ...], o: Tensor
) -> tuple[tuple[int], tuple[int, int, int, bool]]:
    """(grid, (ROWS, BLOCK_D, STATES, MORE)): all states together, or one and then two and two."""
    m, _, _, d, n, n_other, *_ = numbers
    block = triton.next_power_of_2(d)
    states = triton.next_power_of_2(max(n, n_other))
    more = states > _fitting(config, block, o)
    return (-(-m // config.rows),), (config.rows, block, 1 if more else states, more)


def _launch_stack(
    outs: tuple[Tensor, Tensor], o: Tensor, lse: Tensor, numbers: tuple[int, ...], config: Config
) -> None:
    """Launch the stack kernel: one program per row, or per part of a row."""
    m, h, s, d, n, *_ = numbers
    step, _, step_lse, _ = numbers[8:12]
    single, first, _, logs = (numbers[i : i + 3] for i in range(12, 24, 3))
    block = max(1, triton.next_power_of_2(d) // config.parts)
    constants = block, min(triton.next_power_of_2(n), _fitting(config, block, o))
    args = (*outs, o, lse, h, s, d, n, step, step_lse, *single, *first, *logs)
    _stack((m, -(-d // block)), args, constants, num_warps=config.num_warps)


def why_not(args: MergeStatesArgs) -> str | None:
    d = args.o.shape[4]
    return no_float64(*args) or (f"takes rows of at most {WIDEST} elements" if d > WIDEST else None)


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=_every(configure, 2, 4, 16, 64),
    candidates=candidates,
    why_not=why_not,
)
def launch(outs: tuple[Tensor, Tensor], args: MergeStatesArgs, config: Config) -> None:
    o, lse, other, other_lse, _ = args
    strides = map(_strides, (outs[0], o, other, lse, other_lse))
    numbers = _numbers(o.shape, 0 if other is None else other.shape[0], *strides)
    if other is None and o.shape[0] > 2 and config.rows == 1:
        _launch_stack(outs, o, lse, numbers, config)
        return
    second = (o, lse) if _split(o, other) else (other, other_lse)
    grid, constants = _grid_and_constants(config, numbers, o)
    _forward(grid, (*outs, o, lse, *second, *numbers), constants, num_warps=config.num_warps)


def why_not_backward(args: MergeStatesBackwardArgs) -> str | None:
    return no_float64(args.do, args.dlse) or why_not(args.forward)


@register_kernel(
    BACKWARD,
    configure=configure_backward,
    config_type=Config,
    configs=_every(configure_backward, 2),
    candidates=candidates_backward,
    why_not=why_not_backward,
)
def launch_backward(outs: tuple[Tensor, Tensor, Tensor, Tensor], args: MergeStatesBackwardArgs, config: Config) -> None:
    d_o, d_lse, d_other, d_other_lse = outs
    do, dlse, o, lse, other, other_lse, _ = args
    strides = map(_strides, (do, o, other, lse, other_lse, d_o, None if other is None else d_other))
    numbers = _numbers(o.shape, 0 if other is None else other.shape[0], *strides)
    second: tuple[Tensor | None, ...] = (other, other_lse)
    second_grads: tuple[Tensor | None, ...] = (None, None) if other is None else (d_other, d_other_lse)
    begin = 0  # offset of the second stack in d_lse
    if _split(o, other):
        second, second_grads, begin = (o, lse), (d_o, d_lse), numbers[0]
    grid, constants = _grid_and_constants(config, numbers, o)
    values = (d_o, d_lse, *second_grads, do, dlse, o, lse, *second, begin, *numbers)
    _backward(grid, values, constants, num_warps=config.num_warps)
