"""A gradient times a number on the device, in Triton: a few programs read the number, and return if it is 1.

Traffic: none for 1, else the gradient is read and written, 4*M*N bytes at bf16.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.loss.in_place import SCALE, ScaleArgs
from tilewright.ops.rows import RowsBucket, no_float64

_PROGRAMS = 1056  # eight for each multiprocessor of an H200


class Config(NamedTuple):
    block: int
    num_warps: int


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    return Config(min(4096, triton.next_power_of_2(bucket.N)), 4)


CONFIGS = tuple(dict.fromkeys(configure(RowsBucket(1, 1 << k), torch.bfloat16) for k in range(18)))


@triton.jit
def _scale_kernel(x, scale, M, N, parts, stride_x, BLOCK: tl.constexpr):  # x: (M, N)
    factor = tl.load(scale).to(tl.float32)
    tiles = M * parts if factor != 1.0 else 0
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, offs = (tile // parts).to(tl.int64), tile % parts * BLOCK + tl.arange(0, BLOCK)
        ptrs = x + row * stride_x + offs
        value = tl.load(ptrs, mask=offs < N).to(tl.float32) * factor
        tl.store(ptrs, value.to(x.dtype.element_ty), mask=offs < N)


_scale = TritonKernel(_scale_kernel)


@register_kernel(
    SCALE, configure=configure, config_type=Config, configs=CONFIGS, why_not=lambda args: no_float64(*args)
)
def launch(outs: tuple[()], args: ScaleArgs, config: Config) -> None:
    x = args.gradient if args.gradient.dim() == 2 else args.gradient[None]
    m, n = x.shape
    parts = -(-n // config.block)
    grid = (min(m * parts, _PROGRAMS),)
    _scale(grid, (x, args.scale, m, n, parts, x.stride(0)), (config.block,), num_warps=config.num_warps)
