"""Groups of rows in Triton: the portable form, for contiguous groups and masked batches alike, any strides and sizes.

A persistent kernel.  A program counts the tiles of all groups from their limits in device memory, 64 groups at a time,
and does so again to find the group of each of its tiles: some hundred cycles beside the tens of thousands that a tile
takes.  So the host knows of no group's size, and an empty group costs nothing.  Operands come as in `tile_triton.py`;
a tile that ends with its group is stored row by row under a mask, a whole one by the copy engine.

2*T*N*K flops; weights of the groups that have rows once, rows in and out once.  32 groups of 20 rows, 6144x7168 in
bf16: 2.8 GB of weights, 640 us at 4.4 TB/s.
"""

import re
from contextvars import copy_context
from itertools import product
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.gemm.engines import tile_triton as dense
from tilewright.ops.gemm.operands import Major, copyable, major_a, major_b
from tilewright.ops.grouped.engines.rows_triton_kernel import grouped_rows_kernel
from tilewright.ops.grouped.raw import UNSCALED, scaling_code

FILL = 128  # tiles that keep a large GPU busy; the configuration may not depend on the GPU at hand
GROUPS = 64  # whose limits are read at one time
BLOCKS = 2  # from this scaling on a scale serves 128 of K


class Config(NamedTuple):
    """block_m, block_n, block_k: elements of a tile; block_n counts columns of op(B), two for each of a gated result.

    band: tile rows of a group walked together.   descriptors: copy engine where there is one.
    num_stages is what an H200 gets; less where shared memory is smaller.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    band: int
    descriptors: bool


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """The largest tile that still gives FILL tiles if every group has the rows it is expected to have."""
    rows, n, _, groups, _, is_aligned, _, _, scaling = bucket
    if dtype.itemsize == 4:
        return Config(16, 64, 32, 4, 3, 8, False) if rows <= 16 else Config(64, 64, 16, 4, 3, 8, False)
    deep = 128 // dtype.itemsize  # one row of the copy engine's swizzle; with scales, the elements that share one
    if rows <= 64:
        block_m = min(max(rows, 16), 64)
        if scaling >= BLOCKS or is_aligned:
            return Config(block_m, 64, 128, 4, 4, 8, bool(is_aligned))
        return Config(block_m, 64, 64, 4, 3, 8, False)
    if not is_aligned:  # an address for each element of a tile
        return Config(64, 64, 128, 8, 2, 8, False) if scaling >= BLOCKS else Config(128, 128, 32, 8, 3, 8, False)
    tiles = groups * -(-rows // 128) * -(-n // 128)
    if tiles < FILL:
        return Config(64, 128, deep, 4, 4, 8, True)
    if tiles < 3 * FILL or dtype.itemsize == 1:
        # Partial sums of float8 need registers of their own: no room for 256 columns
        return Config(128, 128, deep, 8, 4, 8, True)
    return Config(128, 256, deep, 8, 4, 8, True)


def _configured() -> tuple[Config, ...]:
    rows, sizes = (1, 32, 64, 128, 4096), (64, 1024, 16384)
    buckets = [(m, n, 1024, 1, 0, is_aligned, 16, 0, UNSCALED) for m, n, is_aligned in product(rows, sizes, (0, 1))]
    return tuple(
        dict.fromkeys(configure(bucket, dtype) for bucket in buckets for dtype in (torch.bfloat16, torch.float32))
    )


CONFIGS = _configured()


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Tiles around `configure`'s that leave half of the registers free."""
    rows, _, _, _, _, is_aligned, _, _, scaling = bucket
    forms = (True, False) if is_aligned else (False,)
    if dtype.itemsize == 4:
        return tuple(Config(m, 64, 16, 4, stages, 8, False) for m in (16, 32, 64) for stages in (2, 3))
    depths = (128,) if scaling >= BLOCKS else (64, 128) if dtype.itemsize == 2 else (128,)
    if rows <= 64:
        space = product((16, 32, 64), (32, 64, 128), depths, (4, 6), forms)
        return tuple(
            Config(m, n, k, 4, stages, 8, form)
            for m, n, k, stages, form in space
            if stages * (m + n) * k * dtype.itemsize <= 160 << 10
        )
    tiles = [(64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8)]
    if dtype.itemsize == 2:
        tiles += [(64, 256, 4), (128, 256, 8), (256, 128, 8)]
    return tuple(
        Config(m, n, 128 // dtype.itemsize, warps, stages, band, form)
        for (m, n, warps), stages, band, form in product(tiles, (3, 4), (4, 8), forms)
    )


def refusal(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    starts: Tensor | None,
    ends: Tensor,
    expected: int,
    activation: str,
    out_dtype: torch.dtype,
) -> str | None:
    """What a GPU's matrix units lack, and scales in other blocks than the named ones."""
    lacking = no_float8(a)
    if lacking is None and scaling_code(a, b, scale_a, scale_b) > BLOCKS + 1:
        return "takes scales of whole tensors, of rows, 1x128 by 128x128, or 1x128 by 1x128"
    return lacking


def no_float8(a: Tensor) -> str | None:
    """Why a GPU cannot multiply `a`, if it is float8."""
    arch = dense._target(a)
    if a.dtype is torch.float8_e4m3fn and re.fullmatch(r"sm_8[0-8]|gfx9[0-4]\w+", arch):
        return f"multiplies float8_e4m3fn on sm_89 and gfx950 and later, and this is {arch}"
    return None


_kernel = TritonKernel(grouped_rows_kernel)


def gemm(
    d: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    starts: Tensor | None,
    ends: Tensor,
    activation: str,
    config: Config,
) -> None:
    """d (Ba, R, N_out) = act(rows of group g @ b[g]); see the package's docstring."""
    count, rows, k = a.shape
    groups, _, n = b.shape
    batched = count > 1 or count == groups
    scaling = scaling_code(a, b, scale_a, scale_b)
    arch = dense._target(a)
    a_major, b_major = major_a(a), major_b(b)
    strides, descriptors = (*d.stride()[:2], *a.stride(), *b.stride()), False
    expressible = all(map(copyable, (d, a, b)))
    if config.descriptors and expressible and dense._has_descriptors(arch):
        pitches = [dense._pitches(a, 1 if a_major is Major.K else 2), dense._pitches(b, 2 if b_major is Major.K else 1)]
        (a_batch, a_pitch), (b_batch, b_pitch) = pitches
        strides = (*dense._pitches(d, 1), a_batch, a_pitch, a_pitch, b_batch, b_pitch, b_pitch)
        descriptors = True
    fit = dense._fit(
        narrowed(config, arch, a.dtype, scaling), arch, a.element_size(), d.element_size(), None, activation
    )
    config = fit.config
    most = groups * triton.cdiv(rows, config.block_m) if batched else triton.cdiv(rows, config.block_m) + groups
    grid = (max(1, min(most * triton.cdiv(n, config.block_n), fit.programs * usable_sms(a.device))),)
    args = (
        d, a, b, scale_a, scale_b, starts, ends, groups, rows, n, k,
        *strides, *_scale_strides(scale_a), *_scale_strides(scale_b),
    )  # fmt: skip
    constants = (
        activation, scaling, batched, descriptors, a_major is Major.K, b_major is Major.K,
        dense._vector(a, k if a_major is Major.K else rows), dense._vector(b, k if b_major is Major.K else n),
        dense._vector(d, d.shape[2]), k % config.block_k == 0, dense._wide(d, a, b),
        GROUPS, config.band, fit.parts, *config[:3],
    )  # fmt: skip
    # Triton keeps descriptors in memory that it asks an allocator for; the caller's own allocator stays in force
    context = copy_context()
    context.run(triton.set_allocator, dense._allocate)
    context.run(_kernel, grid, args, constants, num_warps=config.num_warps, num_stages=config.num_stages)


def narrowed(config: Config, arch: str, dtype: torch.dtype, scaling: int) -> Config:
    """`config` where the sums of a block of float8 pass through more registers than on Hopper."""
    if dtype.itemsize > 1 or scaling < BLOCKS or arch in ("sm_89", "sm_90", "cpu"):
        return config
    return config._replace(block_n=min(config.block_n, 64))


def _scale_strides(scale: Tensor | None) -> tuple[int, int, int]:
    """0 along a dimension of one scale, which serves all blocks there."""
    if scale is None:
        return 0, 0, 0
    batch, rows, depth = (stride if n > 1 else 0 for n, stride in zip(scale.shape, scale.stride(), strict=True))
    return batch, rows, depth
