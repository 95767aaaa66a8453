"""Groups along K in Triton, k_grouped_matmul: the portable form, for any strides, sizes and ends of groups.

The host knows the tiles of all results, but not K of each group: a program reads where its group begins and ends,
multiplies full blocks of K, and reads the rest element by element under a mask, since the next group follows.  An empty
group stores c, or zeros.  With scales of 128 along K, groups end at multiples of 128 and have no rest.

2*T*M*N flops; a is read once for each column of tiles, b for each row, results are written once.  8 groups of 4096x7168
over 32768 rows in bf16 cannot beat 1.95 ms at 989 TFLOP/s.
"""

from itertools import product

import torch
import triton
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.gemm.grouped.args import UNSCALED, KGroupedArgs, KGroupedBucket, scaling_code, whole_blocks
from tilewright.ops.gemm.k_grouped_matmul import FORWARD
from tilewright.ops.gemm.kernels.triton import tiles as tiling
from tilewright.ops.gemm.kernels.triton.grouped_tiles import (
    Config,
    descriptor_strides,
    fitted,
    launch_with_descriptors,
    no_float8,
)
from tilewright.ops.gemm.kernels.triton.k_grouped_kernel import k_grouped_kernel
from tilewright.ops.gemm.operands import Major, major_a, major_b
from tilewright.ops.gemm.scaled.scaling import Scaling


def configure(bucket: KGroupedBucket, dtype: torch.dtype) -> Config:
    """Returns tiles of 128x256, smaller if promotion needs a second accumulator or M and N are small."""
    m, n, is_aligned = bucket.M, bucket.N, bucket.aligned
    if dtype.itemsize == 4:
        return Config(64, 64, 16, 4, 3, 8, False)
    deep = 128 // dtype.itemsize
    if not is_aligned:
        return Config(128, 128, 32 if dtype.itemsize == 2 else 128, 8, 3, 8, False)
    if dtype.itemsize == 1:
        return Config(128, 128, deep, 8, 4, 8, True)
    return Config(64, 128, deep, 4, 4, 8, True) if min(m, n) <= 512 else Config(128, 256, deep, 8, 4, 8, True)


CONFIGS = tuple(
    dict.fromkeys(
        configure(KGroupedBucket(4096, size, size, 4, 2, is_aligned, 32, UNSCALED), dtype)
        for size in (64, 4096)
        for is_aligned in (0, 1)
        for dtype in (torch.bfloat16, torch.float32)
    )
)


def candidates(bucket: KGroupedBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns tiles whose accumulator leaves half of the registers free."""
    is_aligned, scaling = bucket.aligned, bucket.scaling
    forms = (True, False) if is_aligned else (False,)
    if dtype.itemsize == 4:
        return tuple(Config(m, 64, 16, 4, stages, 8, False) for m in (32, 64) for stages in (2, 3))
    tiles = [(64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8)]
    if dtype.itemsize == 2:
        tiles += [(64, 256, 4), (128, 256, 8), (256, 128, 8)]
    depth = 128 if scaling != UNSCALED else 128 // dtype.itemsize
    return tuple(
        Config(m, n, depth, warps, stages, group_m, form)
        for (m, n, warps), stages, group_m, form in product(tiles, (3, 4), (4, 8), forms)
    )


def why_not(args: KGroupedArgs) -> str | None:
    """Why this kernel cannot run these arguments, by GPU and scales; None if it can."""
    reason = no_float8(args.a)
    scaling = scaling_code(args.a, args.b, args.scale_a, args.scale_b)
    if reason is None and scaling not in (UNSCALED, Scaling.TOKEN_TOKEN):
        return "takes scales (M, T/128) and (N, T/128), one for 128 along T"
    return reason or whole_blocks(args)


_kernel = TritonKernel(k_grouped_kernel)


def gemm(d: Tensor, args: KGroupedArgs, config: Config) -> None:
    """d (G, M, N) = a[:, group g] @ b[group g, :] + c[g], c (G, M, N) of any strides or d itself.

    Group g is ends[g - 1] <= t < ends[g], clamped to 0..T; every element of d is written.
    """
    a, b, scale_a, scale_b, c, ends, _ = args
    (m, total), n, groups = a.shape, b.shape[1], ends.shape[0]
    scaling = scaling_code(a, b, scale_a, scale_b)
    a3, b3 = a.unsqueeze(0), b.unsqueeze(0)
    a_k, b_k = major_a(a) is Major.K, major_b(b) is Major.K
    vectors = tiling.vector_width(a3, total if a_k else m), tiling.vector_width(b3, total if b_k else n)
    # Descriptors need offsets of 16 bytes along the contiguous dimension, and unscaled groups begin at any t
    anywhere = scaling == UNSCALED and (a_k or b_k)
    strides = None if anywhere else descriptor_strides(config, d, a3, b3)
    if strides is None:
        config = _by_pointers(config, 1 if a_k or b_k else min(vectors))
    fit = fitted(config, scaling, a, d, c)
    block_m, block_n, block_k = fit.config[:3]
    grid = (
        max(1, min(groups * triton.cdiv(m, block_m) * triton.cdiv(n, block_n), fit.programs * usable_sms(a.device))),
    )
    d_group, d_row, _, *a_strides, _, b_row, b_column = strides or (*d.stride()[:2], *a3.stride(), *b3.stride())
    scale_strides = [(0, 0) if s is None else s.stride() for s in (scale_a, scale_b)]
    kernel_args = (
        d, a, b, scale_a, scale_b, c, ends, groups, m, n, total, d_group, d_row, *a_strides, b_row, b_column,
        *((0, 0, 0) if c is None else c.stride()), *scale_strides[0], *scale_strides[1],
    )  # fmt: skip
    constants = (
        scaling, strides is not None, a_k, b_k, *vectors, tiling.vector_width_of_c(c), tiling.vector_width(d, n),
        tiling.needs_wide_offsets(d, a3, b3, c), fit.config.group_m, fit.parts, block_m, block_n, block_k,
    )  # fmt: skip
    launch_with_descriptors(_kernel, grid, kernel_args, constants, fit.config)


def _by_pointers(config: Config, vector: int) -> Config:
    """Returns `config` without TMA.  A group begins at any t, so an operand that is contiguous along T cannot be read
    in vectors: it takes an address for each element.
    """
    width = 64 if vector == 1 else 128
    return config._replace(block_n=min(config.block_n, width), block_k=min(config.block_k, 32), num_warps=8)


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: KGroupedArgs, config: Config) -> None:
    gemm(outs[0], args, config)
