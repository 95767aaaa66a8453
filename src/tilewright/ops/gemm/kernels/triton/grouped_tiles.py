"""Shared by the Triton kernels of grouped products: the tile config, what fits a GPU, and a launch with descriptors."""

import re
from contextvars import copy_context
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tilewright.jit.triton_launch import TritonKernel, target_of
from tilewright.ops.gemm.kernels.triton import tiles as tiling
from tilewright.ops.gemm.operands import Major, copyable, major_a, major_b

BLOCKS = 2
"""Scalings from this one on have a scale for each 128 of K."""


class Config(NamedTuple):
    """block_m, block_n, block_k: elements of a tile; block_n counts columns of op(B), two for each of a gated result.

    group_m: tile rows of a group taken together (GROUP_SIZE_M).   descriptors: TMA if there is one.
    num_stages is what an H200 gets; less where shared memory is smaller.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int
    descriptors: bool


def no_float8(a: Tensor) -> str | None:
    """Why a GPU cannot multiply `a`, if it is float8."""
    arch = target_of(a)
    if a.dtype is torch.float8_e4m3fn and re.fullmatch(r"sm_8[0-8]|gfx9[0-4]\w+", arch):
        return f"multiplies float8_e4m3fn on sm_89 and gfx950 and later, and this is {arch}"
    return None


def fitted(
    config: Config, scaling: int, a: Tensor, d: Tensor, c: Tensor | None = None, activation: str = ""
) -> tiling.Fit:
    """Fits `config` into the shared memory of the GPU of `a`.  Narrower if float8 promotion takes more registers than
    on Hopper; fewer stages on AMD, where operands are staged in registers.
    """
    arch = target_of(a)
    if a.dtype.itemsize == 1 and scaling >= BLOCKS and arch not in ("sm_89", "sm_90", "cpu"):
        config = config._replace(block_n=min(config.block_n, 64))
    if arch.startswith("gfx"):
        block_k = min(config.block_k, 128 // a.dtype.itemsize)
        # Masks and strides take scalar registers: at most two stages, one if K is masked, no tiles of 32 rows
        config = config._replace(
            block_m=64 if config.block_m == 32 else config.block_m,
            block_k=block_k,
            num_stages=1 if a.shape[-1] % block_k else 2,
        )
    return tiling.fitted(tiling.Config(*config, 1), arch, a.element_size(), d.element_size(), c, activation)


def descriptor_strides(config: Config, d: Tensor, a: Tensor, b: Tensor) -> tuple[int, ...] | None:
    """Returns the strides of d, a and b (B, rows, columns) for TMA, without unit strides; None without TMA."""
    if not (config.descriptors and all(map(copyable, (d, a, b))) and tiling.has_descriptors(target_of(a))):
        return None
    a_batch, a_pitch = tiling.pitches(a, 1 if major_a(a) is Major.K else 2)
    b_batch, b_pitch = tiling.pitches(b, 2 if major_b(b) is Major.K else 1)
    return (*tiling.pitches(d, 1), a_batch, a_pitch, a_pitch, b_batch, b_pitch, b_pitch)


def launch_with_descriptors(
    kernel: TritonKernel, grid: tuple[int], args: tuple[Any, ...], constants: tuple[Any, ...], config: tiling.Config
) -> None:
    """Launches with an allocator for Triton's descriptors; the context keeps the caller's allocator in force."""
    context = copy_context()
    context.run(triton.set_allocator, tiling.allocate_descriptors)
    context.run(kernel, grid, args, constants, num_warps=config.num_warps, num_stages=config.num_stages)
