"""Softmax and its logarithm in Triton, in three forms that differ in where a row is kept while its maximum and sum are
computed.

short   A row fits in registers: one read, one write.
long    One program a row keeps the first `held` elements in registers and reads the rest twice: forwards with a running
        maximum and sum in every lane, without a barrier; then backwards, so that the elements read last are still in
        L1, or in L2, which on an H200 (60 MB) has room for 132 rows of 256 KB.  Second reads and stores are evicted
        first.
split   Few long rows, as in decoding: many programs a row write maximum and sum of their part, a second launch scales.

Traffic: forward 4*M*N bytes at bf16, so 4096x128256 cannot beat 500 us at 4.2 TB/s; backward reads dy and y and writes
dx, 6*M*N, 750 us.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel, target_of
from tilewright.ops.reduction import log_softmax
from tilewright.ops.reduction.kernels.triton.softmax_kernels import (
    softmax_backward_kernel,
    softmax_backward_long_kernel,
    softmax_kernel,
    softmax_long_kernel,
    softmax_part_kernel,
    softmax_scale_kernel,
)
from tilewright.ops.reduction.log_softmax import LogSoftmaxArgs, LogSoftmaxBackwardArgs
from tilewright.ops.reduction.softmax import BACKWARD, FORWARD, SoftmaxArgs, SoftmaxBackwardArgs
from tilewright.ops.rows import RowsBucket, as_rows

REGISTERS = 32768  # float32 elements that a program holds: 64 registers a thread at 16 warps
SPLIT_ROWS = 64  # from here on, one program a row fills half of an H200


class Config(NamedTuple):
    held: int  # elements of a row in registers, a power of two; longer rows take the long form
    num_warps: int
    rows: int = 1  # short: rows per program
    num_stages: int = 1  # long: of the loop over a row
    steps: int = 2  # long: 16-byte vectors per thread in one step of the loop
    split: int = 0  # elements per program of a row that several programs share; 0: one program a row
    packed: bool = False  # short, long: 16-bit elements stay packed in registers between uses, on NVIDIA alone


def _short(n: int, held: int) -> Config:
    block = triton.next_power_of_2(n)
    return Config(held, num_warps=min(16, max(4, block // 1024)), rows=max(1, min(32, 2048 // block)))


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    m, n = bucket
    if n <= REGISTERS:
        return _short(n, REGISTERS)
    if m > SPLIT_ROWS:
        return Config(REGISTERS // 2, num_warps=16, steps=4)  # holding all REGISTERS spills on sm_100
    return Config(REGISTERS, num_warps=4, split=1024 if m <= 2 else 4096)


def configure_backward(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    _, n = bucket
    held = REGISTERS // 2  # elements of dy and as many of y
    if held < n <= REGISTERS and dtype.itemsize == 2:
        # The whole row, packed, was the fastest of all at 4096 x 32768: 198.5 us (H200, 2026-11)
        return Config(REGISTERS, num_warps=16, packed=True)
    return _short(n, held) if n <= held else Config(held, num_warps=16)


_WIDTHS = tuple(1 << k for k in range(17))
CONFIGS = tuple(dict.fromkeys(configure(RowsBucket(m, n), torch.bfloat16) for n in _WIDTHS for m in (1, 8, 4096)))
BACKWARD_CONFIGS = tuple(dict.fromkeys(configure_backward(RowsBucket(4096, n), torch.bfloat16) for n in _WIDTHS))

_PARTS = ((512, 2), (512, 4), (1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8), (8192, 16))
_SPLIT = tuple(Config(REGISTERS, warps, split=n) for n, warps in _PARTS)


def _forms(dtype: torch.dtype) -> tuple[bool, ...]:
    return (False, True) if dtype.itemsize == 2 and torch.version.hip is None else (False,)


def _short_space(n: int, held: int, dtype: torch.dtype) -> tuple[Config, ...]:
    """4 to 64 elements a thread; packed ones take half the registers, so that two programs fit on an SM."""
    block = triton.next_power_of_2(n)
    return tuple(
        Config(held, warps, rows, packed=packed)
        for packed in _forms(dtype)
        for warps in (1, 2, 4, 8, 16, 32)
        for rows in (1, 2, 4, 8, 16, 32)
        if rows * block <= max(held, 2048)
        and (16 if packed else 4 if block <= 256 else 8) <= rows * block // (32 * warps) <= 64
        and (rows == 1 or block <= 4096)
    )


def _long_space(held: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """8 to 64 held elements a thread, and one to four vectors a step."""
    return tuple(
        Config(elements, warps, steps=steps, packed=packed)
        for packed in _forms(dtype)
        for elements in held
        for warps in (8, 16, 32)
        for steps in (1, 2, 4)
        if (32 if packed else 8) <= elements // (32 * warps) <= 64 and steps * warps <= 64
    )


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    m, n = bucket
    short = _short_space(n, REGISTERS, dtype) if n <= REGISTERS else ()
    long = _long_space((8192, 16384, 32768, 65536), dtype) if n > REGISTERS // 2 and m >= SPLIT_ROWS else ()
    split = _SPLIT if n > REGISTERS and m <= 2 * SPLIT_ROWS else ()
    return (*short, *(c for c in long if c.held < n), *split)


def candidates_backward(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    _, n = bucket
    held = REGISTERS // 2
    # 32 warps hold twice as much, where the GPU takes programs of 1024 threads
    short = _short_space(n, max(held, triton.next_power_of_2(n)), dtype) if n <= REGISTERS else ()
    long = _long_space((8192, 16384, 32768), dtype) if n > held else ()
    return (*short, *(c for c in long if c.held < n))


class Forms(NamedTuple):
    """The kernels of a row; those of rows that begin at any element have the same parameters and constants."""

    short: TritonKernel
    long: TritonKernel
    part: TritonKernel
    scale: TritonKernel
    short_backward: TritonKernel
    long_backward: TritonKernel


ALIGNED = Forms(
    TritonKernel(softmax_kernel),
    TritonKernel(softmax_long_kernel),
    TritonKernel(softmax_part_kernel),
    TritonKernel(softmax_scale_kernel),
    TritonKernel(softmax_backward_kernel),
    TritonKernel(softmax_backward_long_kernel),
)


def _packed(config: Config, x: Tensor) -> bool:
    return config.packed and x.itemsize == 2 and target_of(x).startswith("sm_")


def _lanes(config: Config, dtype: torch.dtype) -> int:
    """One 16-byte vector for each thread of a program."""
    return config.num_warps * 32 * 16 // dtype.itemsize


@register_kernel(FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates)
def launch(outs: tuple[Tensor], args: SoftmaxArgs, config: Config) -> None:
    forward(outs[0], args.x, config, log=False)


@register_kernel(log_softmax.FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates)
def launch_log(outs: tuple[Tensor], args: LogSoftmaxArgs, config: Config) -> None:
    forward(outs[0], args.x, config, log=True)


@register_kernel(
    BACKWARD,
    configure=configure_backward,
    config_type=Config,
    configs=BACKWARD_CONFIGS,
    candidates=candidates_backward,
)
def launch_backward(outs: tuple[Tensor], args: SoftmaxBackwardArgs, config: Config) -> None:
    backward(outs[0], args.dy, args.y, config, log=False)


@register_kernel(
    log_softmax.BACKWARD,
    configure=configure_backward,
    config_type=Config,
    configs=BACKWARD_CONFIGS,
    candidates=candidates_backward,
)
def launch_log_backward(outs: tuple[Tensor], args: LogSoftmaxBackwardArgs, config: Config) -> None:
    backward(outs[0], args.dy, args.y, config, log=True)


def forward(y: Tensor, x: Tensor, config: Config, *, log: bool, forms: Forms = ALIGNED) -> None:
    """Launch the form that `config` gives rows of `x`."""
    x = as_rows(x)
    m, n = x.shape
    block = triton.next_power_of_2(n)
    if block <= config.held:
        constants = (config.rows, block, _packed(config, x), log)
        grid = (triton.cdiv(m, config.rows),)
        forms.short(grid, (y, x, m, n, x.stride(0)), constants, num_warps=config.num_warps)
    elif config.split:
        parts = -(-n // config.split)
        maxima, sums = (scratch((m, parts), torch.float32, x.device) for _ in range(2))
        parameters = (maxima, sums, x, n, parts, x.stride(0))
        forms.part((m * parts,), parameters, (config.split,), num_warps=config.num_warps)
        constants = (triton.next_power_of_2(parts), config.split, log)
        forms.scale((m * parts,), (y, *parameters), constants, num_warps=config.num_warps)
    else:
        constants = (config.held, config.steps, _lanes(config, x.dtype), config.num_stages, _packed(config, x), log)
        forms.long((m,), (y, x, n, x.stride(0)), constants, num_warps=config.num_warps)


def backward(dx: Tensor, dy: Tensor, y: Tensor, config: Config, *, log: bool, forms: Forms = ALIGNED) -> None:
    """Launch the form that `config` gives rows of `dy` and `y`."""
    dy, y = as_rows(dy), as_rows(y)
    m, n = y.shape
    block = triton.next_power_of_2(n)
    strides = (dy.stride(0), y.stride(0))
    if block <= config.held:
        constants = (config.rows, block, _packed(config, y), log)
        grid = (triton.cdiv(m, config.rows),)
        forms.short_backward(grid, (dx, dy, y, m, n, *strides), constants, num_warps=config.num_warps)
    else:
        constants = (config.held, config.steps, _lanes(config, y.dtype), config.num_stages, _packed(config, y), log)
        forms.long_backward((m,), (dx, dy, y, n, *strides), constants, num_warps=config.num_warps)
