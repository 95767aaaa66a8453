"""Dropout in Triton: each thread computes the random numbers of its own elements, four from a counter.

Traffic: reads x and writes y, 4*M*N bytes at bf16, so 8192x4096 cannot beat 32 us at 4.2 TB/s; with a residual 6*M*N.
Backward as forward: the mask is computed again.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.philox import last_dropped, scale_of
from tilewright.ops.reduction.dropout import BACKWARD, FORWARD, DropoutArgs, DropoutBackwardArgs
from tilewright.ops.rows import RowsBucket, no_float64


class Config(NamedTuple):
    block: int  # elements of a program
    num_warps: int


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    return Config(1024, num_warps=4)


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return tuple(
        Config(block, warps)
        for block in (512, 1024, 2048, 4096, 8192)
        for warps in (1, 2, 4, 8)
        if 4 <= block // (32 * warps) <= 32
    )


CONFIGS = (Config(1024, num_warps=4),)


@triton.jit
def _words(number):
    """The low and the high 32 bits of an int64."""
    return (number & 0xFFFFFFFF).to(tl.uint32), ((number >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _dropout_kernel(
    y, x, residual, seed, offset, count, last, scale,  # y, x, residual: (count,)
    BLOCK: tl.constexpr, DROPS: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """y = x * scale where the 31-bit random number of an element is above `last`, else 0; plus residual."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offs = tl.arange(0, BLOCK)
    mask = offs < count - start
    value = (tl.load(x + start + offs, mask=mask).to(tl.float32) * scale).to(y.dtype.element_ty)
    if DROPS:
        # Counter i serves the elements 4*i to 4*i + 3
        c0, c1 = _words(start // 4 + tl.arange(0, BLOCK // 4))
        c2, c3 = tl.zeros_like(c0), tl.zeros_like(c0)
        if HAS_OFFSET:
            low, high = _words(tl.load(offset))
            c2, c3 = c2 + low, c3 + high
        r0, r1, r2, r3 = tl.philox(tl.load(seed), c0, c1, c2, c3)
        random = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), (BLOCK,))
        value = tl.where((random >> 1).to(tl.int32) > last, value, 0.0)
    if HAS_RESIDUAL:
        added = tl.load(residual + start + offs, mask=mask).to(tl.float32)
        value = (value.to(tl.float32) + added).to(y.dtype.element_ty)
    tl.store(y + start + offs, value, mask=mask)


_kernel = TritonKernel(_dropout_kernel)


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=lambda args: no_float64(args.x),
)
def launch(outs: tuple[Tensor], args: DropoutArgs, config: Config) -> None:
    _launch(outs[0], args.x, args.residual, args.seed, args.offset, args.p, config)


@register_kernel(
    BACKWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=lambda args: no_float64(args.dy),
)
def launch_backward(outs: tuple[Tensor], args: DropoutBackwardArgs, config: Config) -> None:
    _launch(outs[0], args.dy, None, args.seed, args.offset, args.p, config)


def _launch(
    y: Tensor, x: Tensor, residual: Tensor | None, seed: Tensor, offset: Tensor | None, p: float, config: Config
) -> None:
    x, count, last = x.contiguous(), x.numel(), last_dropped(p)
    added = x if residual is None else residual.contiguous()
    parameters = (y, x, added, seed, seed if offset is None else offset, count, last, scale_of(p))
    constants = (config.block, last >= 0, offset is not None, residual is not None)
    _kernel((triton.cdiv(count, config.block),), parameters, constants, num_warps=config.num_warps)
