"""States of attention joined in Triton, there and back.  A program holds some rows of the result, whole, in registers.

First the logarithms of its rows, N numbers each: their maximum, then the sum of exp(lse_i - maximum), in the order of
the states.  Then o' = sum_i w_i o_i, w_i = exp(lse_i - maximum) / sum; the weights are computed twice rather than kept,
so that N is a number of run time.  Backwards do_i = w_i do, dlse_i = w_i (do . o_i - sum_j w_j do . o_j + dlse'): the
sum first, then all else, with a second reading of all o_i but a stack's first.  (do . o' would spare that walk, but o'
is rounded and the difference cancels: for one state it must be 0.)

It should run like a copy.  So the first state of each stack is on its way before anything waits for a logarithm, two
states are always two stacks of one, without a loop, stores come last (no read passes a store, which might be to the
same place), and rows of dense tensors are found without a division.  On sm_90 that makes 260 instructions of 1570 for
two states of bf16.

Traffic at bf16: forward reads N states of M * (2 * D + 4) bytes and writes one, so two states of 8192 x 32 heads with
D = 128 move 204 MB, 49 us at 4.2 TB/s; backward moves 2 * N + 1 of them, 81 us.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.attention.merge_states.triton_kernel import merge_backward_kernel, merge_kernel
from tilewright.ops.rows import no_float64

MANY = 4096  # rows; tiles of 16 of them are two programs for every SM of an H200
WIDEST = 4096  # elements of a row; the backward has three float32 of each in registers


class Config(NamedTuple):
    rows: int  # of one program
    num_warps: int


def _configure(bucket: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> Config:
    """Tiles of `nbytes` a state, a 16-byte read a thread, and at most 32 rows; for few rows, as in decoding, a tile of
    one warp, so that there are programs for every SM.
    """
    m, d, _ = bucket
    row = triton.next_power_of_2(d) * dtype.itemsize
    rows = max(1, min(32, (nbytes if m >= MANY else 512) // row))
    return Config(rows, num_warps=max(1, min(8, rows * row // 512)))


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    return _configure(bucket, dtype, 4096)


def configure_backward(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    return _configure(bucket, dtype, 2048)


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """4 to 32 elements of a tile in each thread."""
    m, d, _ = bucket
    block = triton.next_power_of_2(d)
    return tuple(
        Config(rows, warps)
        for rows in (1, 2, 4, 8, 16, 32)
        for warps in (1, 2, 4, 8)
        if rows <= m and 4 <= rows * block // (32 * warps) <= 32
    )


def _every(choose: Callable[[tuple[int, ...], torch.dtype], Config]) -> tuple[Config, ...]:
    """What `choose` returns for heads of usual widths."""
    sizes = [(m, d, 2) for m in (1, MANY) for d in (64, 128, 256, 512)]
    return tuple(dict.fromkeys(choose(size, dtype) for size in sizes for dtype in (torch.bfloat16, torch.float32)))


_forward, _backward = TritonKernel(merge_kernel), TritonKernel(merge_backward_kernel)


def _split(o: Tensor, other: Tensor | None) -> bool:
    """One stack of two states runs as two of one state, at two places of it: N is a constant then, nothing loops."""
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
    for size, *at in zip(lead, single[:3], *(t[1:4] for t in stacks), strict=True):
        if size > 1 and joined and all(outer == size * inner for outer, inner in zip(joined[-1][1], at, strict=True)):
            joined[-1] = (joined[-1][0] * size, tuple(at))
        elif size > 1:
            joined.append((size, tuple(at)))
    joined += [(1, (0,) * (1 + len(stacks)))] * (3 - len(joined))
    (_, h, s), strides = zip(*joined, strict=True)
    by_tensor = [stride for tensor in zip(*strides, strict=True) for stride in tensor]
    return math.prod(lead), h, s, d, n, n_other, *begins, *steps, *by_tensor


def _grid_and_constants(rows: int, numbers: tuple[int, ...]) -> tuple[tuple[int], tuple[int, int]]:
    m, _, _, d, *_ = numbers
    return (-(-m // rows),), (rows, 1 << (d - 1).bit_length())


def _supports(*args: Any) -> str | None:
    d = next(a for a in args if isinstance(a, Tensor)).shape[-1]
    return no_float64(*args) or (f"takes rows of at most {WIDEST} elements" if d > WIDEST else None)


@register_impl(
    "merge_states",
    backend="triton",
    configure=configure,
    config_type=Config,
    configs=_every(configure),
    candidates=candidates,
    supports=_supports,
)
def launch(
    outs: tuple[Tensor, Tensor],
    o: Tensor,
    lse: Tensor,
    other: Tensor | None,
    other_lse: Tensor | None,
    out_dtype: torch.dtype,
    *,
    config: Config,
) -> None:
    strides = map(_strides, (outs[0], o, other, lse, other_lse))
    numbers = _numbers(o.shape, 0 if other is None else other.shape[0], *strides)
    second = (o, lse) if _split(o, other) else (other, other_lse)
    grid, constants = _grid_and_constants(config.rows, numbers)
    _forward(grid, (*outs, o, lse, *second, *numbers), constants, num_warps=config.num_warps)


@register_impl(
    "merge_states",
    backend="triton",
    direction="bwd",
    configure=configure_backward,
    config_type=Config,
    configs=_every(configure_backward),
    candidates=candidates,
    supports=_supports,
)
def launch_backward(
    outs: tuple[Tensor, Tensor, Tensor, Tensor],
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    other: Tensor | None,
    other_lse: Tensor | None,
    out_dtype: torch.dtype,
    *,
    config: Config,
) -> None:
    d_o, d_lse, d_other, d_other_lse = outs
    strides = map(_strides, (do, o, other, lse, other_lse, d_o, None if other is None else d_other))
    numbers = _numbers(o.shape, 0 if other is None else other.shape[0], *strides)
    second: tuple[Tensor | None, ...] = (other, other_lse)
    made: tuple[Tensor | None, ...] = (None, None) if other is None else (d_other, d_other_lse)
    begin = 0  # of made's logarithms in their tensor
    if _split(o, other):
        second, made, begin = (o, lse), (d_o, d_lse), numbers[0]
    grid, constants = _grid_and_constants(config.rows, numbers)
    args = (d_o, d_lse, *made, do, dlse, o, lse, *second, begin, *numbers)
    _backward(grid, args, constants, num_warps=config.num_warps)
