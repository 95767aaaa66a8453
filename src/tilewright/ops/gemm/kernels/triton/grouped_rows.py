"""Groups of rows in Triton, grouped_matmul and masked_matmul: the portable form, for any strides and sizes.

A persistent kernel.  A program counts the tiles of all groups from their limits in device memory, 64 groups at a time,
and again to find the group of each of its tiles: some hundred cycles, while a tile takes tens of thousands.  So the
host needs no group sizes, and an empty group costs nothing.  Operands are read as in `dense.py`; a full tile is
stored by TMA, a tile that ends with its group under a mask.

2*T*N*K flops; weights of the groups that have rows once, rows in and out once.  32 groups of 20 rows, 6144x7168 in
bf16: 2.8 GB of weights, 640 us at 4.4 TB/s.
"""

from itertools import product

import torch
import triton
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.gemm.grouped.args import UNSCALED, GroupedArgs, GroupedBucket, scaling_code
from tilewright.ops.gemm.grouped_matmul import FORWARD as GROUPED
from tilewright.ops.gemm.kernels.triton import tiles as tiling
from tilewright.ops.gemm.kernels.triton.grouped_rows_kernel import grouped_rows_kernel
from tilewright.ops.gemm.kernels.triton.grouped_tiles import (
    BLOCKS,
    Config,
    descriptor_strides,
    fitted,
    launch_with_descriptors,
    no_float8,
)
from tilewright.ops.gemm.masked_matmul import FORWARD as MASKED
from tilewright.ops.gemm.operands import Major, major_a, major_b

FILL = 128  # tiles that keep a large GPU busy; the configuration may not depend on the GPU at hand
GROUPS = 64  # groups whose limits are read at once


def configure(bucket: GroupedBucket, dtype: torch.dtype) -> Config:
    """Returns the largest tile that still gives FILL tiles if every group has the expected rows."""
    rows, n, groups, is_aligned, scaling = bucket.rows, bucket.N, bucket.G, bucket.aligned, bucket.scaling
    if dtype.itemsize == 4:
        return Config(16, 64, 32, 4, 3, 8, False) if rows <= 16 else Config(64, 64, 16, 8, 3, 8, False)
    deep = 128 // dtype.itemsize  # one row of the TMA swizzle; with scales, the elements that share one
    if rows <= 64:
        block_m = min(max(rows, 16), 64)
        if is_aligned:
            return Config(block_m, 64, 128, 4, 4, 8, True)
        # Unaligned: an address for each element of a tile
        return (
            Config(block_m, 64, 128, 8, 2, 8, False) if scaling >= BLOCKS else Config(block_m, 64, 32, 4, 3, 8, False)
        )
    if not is_aligned:
        return Config(64, 64, 128, 8, 2, 8, False) if scaling >= BLOCKS else Config(128, 128, 32, 8, 3, 8, False)
    tiles = groups * -(-rows // 128) * -(-n // 128)
    if tiles < FILL:
        return Config(64, 128, deep, 4, 4, 8, True)
    if tiles < 3 * FILL or dtype.itemsize == 1:
        # Promotion of float8 needs a second accumulator: no room for 256 columns
        return Config(128, 128, deep, 8, 4, 8, True)
    return Config(128, 256, deep, 8, 4, 8, True)


def _configured() -> tuple[Config, ...]:
    rows, sizes = (1, 32, 64, 128, 4096), (64, 1024, 16384)
    buckets = [
        GroupedBucket(m, n, 1024, 1, 0, is_aligned, 16, 0, UNSCALED)
        for m, n, is_aligned in product(rows, sizes, (0, 1))
    ]
    return tuple(
        dict.fromkeys(configure(bucket, dtype) for bucket in buckets for dtype in (torch.bfloat16, torch.float32))
    )


CONFIGS = _configured()


def candidates(bucket: GroupedBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns tiles similar to `configure`'s that leave half of the registers free."""
    rows, is_aligned, scaling = bucket.rows, bucket.aligned, bucket.scaling
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
        Config(m, n, 128 // dtype.itemsize, warps, stages, group_m, form)
        for (m, n, warps), stages, group_m, form in product(tiles, (3, 4), (4, 8), forms)
    )


def why_not(args: GroupedArgs) -> str | None:
    """Why this kernel cannot run these arguments, by GPU and scales; None if it can."""
    reason = no_float8(args.a)
    if reason is None and scaling_code(args.a, args.b, args.scale_a, args.scale_b) > BLOCKS + 1:
        return "takes scales of whole tensors, of rows, 1x128 by 128x128, or 1x128 by 1x128"
    return reason


_kernel = TritonKernel(grouped_rows_kernel)


def gemm(d: Tensor, args: GroupedArgs, config: Config) -> None:
    """Rows starts[g] .. ends[g] of d (Ba, R, N_out) = act(those of a @ b[g]); other rows of d stay as they are.

    Ba is 1, or G: then rows of group g are those of a[g].  Starts and ends are clamped to 0..R.
    """
    a, b, scale_a, scale_b, starts, ends, _, activation, _ = args
    count, rows, k = a.shape
    groups, _, n = b.shape
    batched = count > 1 or count == groups
    scaling = scaling_code(a, b, scale_a, scale_b)
    a_k, b_k = major_a(a) is Major.K, major_b(b) is Major.K
    # Descriptors need offsets of 16 bytes along the contiguous dimension, and groups begin at any row: an M-major a is
    # read by an address for each element
    strides = descriptor_strides(config, d, a, b) if a_k else None
    if not a_k:
        config = config._replace(block_n=min(config.block_n, 128))
    fit = fitted(config, scaling, a, d, activation=activation)
    block_m, block_n, block_k = fit.config[:3]
    most = groups * triton.cdiv(rows, block_m) if batched else triton.cdiv(rows, block_m) + groups
    grid = (max(1, min(most * triton.cdiv(n, block_n), fit.programs * usable_sms(a.device))),)
    kernel_args = (
        d, a, b, scale_a, scale_b, starts, ends, groups, rows, n, k,
        *(strides or (*d.stride()[:2], *a.stride(), *b.stride())), *_scale_strides(scale_a), *_scale_strides(scale_b),
    )  # fmt: skip
    constants = (
        activation, scaling, batched, strides is not None, a_k, b_k,
        tiling.vector_width(a, k if a_k else rows), tiling.vector_width(b, k if b_k else n),
        tiling.vector_width(d, d.shape[2]),
        k % block_k == 0, tiling.needs_wide_offsets(d, a, b), GROUPS, fit.config.group_m, fit.parts,
        block_m, block_n, block_k,
    )  # fmt: skip
    launch_with_descriptors(_kernel, grid, kernel_args, constants, fit.config)


def _scale_strides(scale: Tensor | None) -> tuple[int, int, int]:
    """Returns the strides of scales, 0 along a dimension of one scale, which all blocks share."""
    if scale is None:
        return 0, 0, 0
    batch, rows, depth = (stride if n > 1 else 0 for n, stride in zip(scale.shape, scale.stride(), strict=True))
    return batch, rows, depth


def launch(outs: tuple[Tensor], args: GroupedArgs, config: Config) -> None:
    gemm(outs[0], args, config)


for _op in (GROUPED, MASKED):
    register_kernel(
        _op, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
    )(launch)
