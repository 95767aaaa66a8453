"""grad_norm in Triton: programs reduce equal parts of the elements, and one program their results.  Few elements are
one part, whose program writes the norm.

The order of the sums depends on the number of elements alone.  The largest magnitude is that of the bits as integers,
in whose order NaN is above infinity.

Traffic: every element read once: 14336 x 4096 in bf16 cannot take less than 27 us at 4.4 TB/s.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.optim.grad_norm import FORWARD, GradNormArgs, GradNormBucket
from tilewright.ops.optim.memory import is_dense
from tilewright.ops.rows import no_float64


class Config(NamedTuple):
    """block: elements of one step of a program; parts: programs at most, a power of two."""

    block: int
    parts: int
    num_warps: int


_ONE_PART = (Config(1024, 1, 4), Config(4096, 1, 8), Config(16384, 1, 16))  # one launch
_FEW, _SOME, _MANY = Config(1024, 128, 4), Config(2048, 1024, 4), Config(8192, 1024, 8)
CONFIGS = (*_ONE_PART, _FEW, _SOME, _MANY)
_CANDIDATES = (
    *CONFIGS,
    Config(8192, 1, 8),
    Config(8192, 1, 16),
    Config(16384, 1, 32),
    Config(2048, 512, 4),
    Config(2048, 2048, 4),
    Config(4096, 512, 8),
    Config(4096, 1024, 4),
    Config(4096, 2048, 4),
    Config(4096, 1024, 8),
    Config(8192, 512, 8),
)


def configure(bucket: GradNormBucket, dtype: torch.dtype) -> Config:
    """Parts for every multiprocessor of an H200 where there are many elements, each with a block in flight: 43.7 us at
    14336 x 4096 in bf16, and 45.4 by blocks of 4096 (H100, 2026-11).
    """
    for config in _ONE_PART:
        if config.block >= bucket.N:
            return config
    if bucket.N <= 1 << 17:
        return _FEW
    return _SOME if bucket.N <= 1 << 22 else _MANY


def candidates(bucket: GradNormBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return tuple(config for config in _CANDIDATES if 2 * config.block * config.parts >= bucket.N or config.parts >= 512)


@triton.jit
def _magnitude_bits(x):
    """int32 in the order of |x|, NaN last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _parts_kernel(
    partial, x, n, steps, NORM: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr
):  # partial: (programs,), x: (n,)
    """NORM: 1, 2, or 0 for the largest magnitude.  Program i takes the blocks i * steps to i * steps + steps - 1.  ONE:
    it is alone, and writes the norm.
    """
    acc = tl.zeros((BLOCK,), tl.int32 if NORM == 0 else tl.float32)
    first = tl.program_id(0).to(tl.int64) * steps * BLOCK
    for i in range(steps):
        offs = first + i * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + offs, mask=offs < n, other=0.0).to(tl.float32)
        if NORM == 0:
            acc = tl.maximum(acc, _magnitude_bits(value))
        elif NORM == 1:
            acc += tl.abs(value)
        else:
            acc += value * value
    if NORM == 0:
        tl.store(partial + tl.program_id(0), tl.max(acc, 0).to(tl.float32, bitcast=True))
    elif ONE and NORM == 2:
        tl.store(partial, tl.sqrt_rn(tl.sum(acc, 0)))
    else:
        tl.store(partial + tl.program_id(0), tl.sum(acc, 0))


@triton.jit
def _whole_kernel(y, partial, parts, NORM: tl.constexpr, PARTS: tl.constexpr):  # partial: (parts,)
    offs = tl.arange(0, PARTS)
    value = tl.load(partial + offs, mask=offs < parts, other=0.0)
    if NORM == 0:
        tl.store(y, tl.max(_magnitude_bits(value), 0).to(tl.float32, bitcast=True))
    elif NORM == 1:
        tl.store(y, tl.sum(value, 0))
    else:
        tl.store(y, tl.sqrt_rn(tl.sum(value, 0)))


_parts, _whole = TritonKernel(_parts_kernel), TritonKernel(_whole_kernel)


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates,
    why_not=lambda args: no_float64(*args),
)  # fmt: skip
def launch(outs: tuple[Tensor], args: GradNormArgs, config: Config) -> None:
    x = args.x if is_dense(args.x) else args.x.contiguous()
    norm = 0 if math.isinf(args.norm_type) else int(args.norm_type)
    blocks = triton.cdiv(x.numel(), config.block)
    steps = triton.cdiv(blocks, config.parts)
    programs = triton.cdiv(blocks, steps)
    one = programs == 1
    partial = outs[0] if one else scratch((programs,), torch.float32, x.device)
    _parts((programs,), (partial, x, x.numel(), steps), (norm, config.block, one), num_warps=config.num_warps)
    if not one:
        _whole((1,), (outs[0], partial, programs), (norm, config.parts), num_warps=4)
