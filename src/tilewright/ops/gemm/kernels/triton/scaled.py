"""Scaled float8 products in Triton, scaled_matmul and scaled_matmul_fp8: the portable form, on NVIDIA and AMD.

A persistent kernel as in `dense.py`, with K split if rows are few.  Each 128 of K are one `tl.dot` from zero,
which is then added to the accumulator with its scales: Hopper's tensor cores accumulate float8 products in some 14
bits, and scales of blocks change after 128 anyway.  So a program holds two accumulators, and tiles are at most 128x128.
GPUs without e4m3 (before sm_89; gfx942) read bytes and multiply them as float16, exactly.

A result in float8 takes a second launch, which casts the first one's float32 result.

2*M*N*K flops; M*K + K*N bytes of operands + M*N*itemsize_out.  4096x7168x16384 cannot beat 0.49 ms at 1979 TFLOP/s.
"""

from contextvars import copy_context
from itertools import product

import torch
import triton
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel, target_of
from tilewright.ops.gemm.kernels.triton.dense import FILL, REDUCE_M, REDUCE_N, reduce_parts
from tilewright.ops.gemm.kernels.triton.scaled_kernel import cast_kernel, scaled_gemm_kernel
from tilewright.ops.gemm.kernels.triton.tiles import (
    Config,
    allocate_descriptors,
    fitted,
    has_descriptors,
    needs_wide_offsets,
    pitches,
    vector_width,
    vector_width_of_c,
)
from tilewright.ops.gemm.operands import Major, copyable, major_a, major_b
from tilewright.ops.gemm.scaled.args import (
    ScaledBucket,
    ScaledMatmulArgs,
    ScaledMatmulFp8Args,
    as_batch,
    plain_scaled_args,
    with_result,
)
from tilewright.ops.gemm.scaled.scaling import Scaling, scaling_of
from tilewright.ops.gemm.scaled_matmul import FORWARD
from tilewright.ops.gemm.scaled_matmul_fp8 import FORWARD as FORWARD_FP8
from tilewright.ops.quant.kernels.triton.numbers import as_stored

DEEP = 128  # block_k of every config
CAST_M = 8  # rows of a program of the cast


def configure(bucket: ScaledBucket, dtype: torch.dtype) -> Config:
    """Returns the largest tile that still gives FILL tiles; up to 64 rows get narrow ones, with K split."""
    m, n, k, is_aligned = bucket.M, bucket.N, bucket.K, bucket.aligned
    if m <= 64:
        rows, columns, splits = 16 if m <= 16 else 64, 64 if is_aligned else 32, 1
        while splits < 8 and 2 * splits * -(-n // columns) <= FILL + 4 and k >= 1024 * splits:
            splits *= 2
        return Config(rows, columns, DEEP, 4, 4 if is_aligned else 3, 8, bool(is_aligned), splits)
    if not is_aligned:
        return Config(64, 64, DEEP, 4, 3, 8, False, 1)
    if -(-m // 128) * -(-n // 128) < FILL:
        return Config(64, 128, DEEP, 4, 4, 8, True, 1)
    return Config(128, 128, DEEP, 8, 4, 8, True, 1)


def _configured() -> tuple[Config, ...]:
    powers = [1 << i for i in range(6, 15)]
    sizes = product((1, 64, 128, 4096), powers, powers, (0, 1))
    buckets = [ScaledBucket(m, n, k, 0, is_aligned, 16, 0, 0) for m, n, k, is_aligned in sizes]
    return tuple(dict.fromkeys(configure(bucket, torch.float8_e4m3fn) for bucket in buckets))


CONFIGS = _configured()


def candidates(bucket: ScaledBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns tiles of up to 128x128, the largest whose two accumulators fit the registers."""
    m, k, is_aligned = bucket.M, bucket.K, bucket.aligned
    forms = (True, False) if is_aligned else (False,)
    if m <= 64:
        rows = max(m, 16)
        space = product((32, 64, 128), (4, 6), forms, (1, 2, 4, 8))
        return tuple(
            Config(rows, n, DEEP, 4, stages, 8, form, splits)
            for n, stages, form, splits in space
            if splits == 1 or k >= 4 * splits * DEEP
        )
    tiles = ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8))
    return tuple(
        Config(*tile[:2], DEEP, tile[2], stages, group_m, form, 1)
        for tile, stages, group_m, form in product(tiles, (3, 4), (4, 8), forms)
    )


def why_not(args: ScaledMatmulArgs | ScaledMatmulFp8Args) -> str | None:
    """Why this kernel cannot run these scales; None if it can."""
    if scaling_of(args.a, args.b, args.scale_a, args.scale_b) is Scaling.OTHER:
        return (
            "multiplies operands that are scaled by tensor, by row and column, 1x128 by 128x128, or 1x128 by 1x128; "
            f"got scales {tuple(args.scale_a.shape)} and {tuple(args.scale_b.shape)}"
        )
    return None


_gemm = TritonKernel(scaled_gemm_kernel)
_cast = TritonKernel(cast_kernel)


def gemm(d: Tensor, args: ScaledMatmulArgs, config: Config) -> None:
    """d = act(alpha * (a * scale_a) @ (b * scale_b) + bias) + c.

    d: (B, M, N_out); a: (B, M, K); b: (B, K, N); scale_a: (B, M blocks, K blocks); scale_b: (B, N blocks, K blocks);
    c: (B, M, N_out), may be d.
    """
    a, b, bias, c = args.a, args.b, args.bias, args.c
    batch, m, k = a.shape
    n = b.shape[2]
    blocks = triton.cdiv(k, DEEP)
    splits = triton.cdiv(blocks, triton.cdiv(blocks, config.splits))  # no part of K is empty
    if splits == 1:
        _multiply(d, args, 1, config)
        return
    partials = scratch((splits * batch, m, n), torch.float32, d.device)
    _multiply(partials, plain_scaled_args(a, b, args.scale_a, args.scale_b, torch.float32), splits, config)
    grid = (batch * triton.cdiv(m, REDUCE_M) * triton.cdiv(n, REDUCE_N),)
    sizes = (batch, m, n, splits, *d.stride()[:2], *_epilogue_strides(bias, c))
    constants = (args.activation, needs_wide_offsets(d, c), REDUCE_M, REDUCE_N)
    reduce_parts(grid, (d, partials, bias, c, None, args.alpha, *sizes), constants, num_warps=4)


def gemm_fp8(q: Tensor, scales: Tensor, args: ScaledMatmulArgs, config: Config) -> None:
    """q (B, M, N_out) and scales (B, M, groups of 128) of the same result."""
    z = scratch(q.shape, torch.float32, q.device)
    gemm(z, args, config)
    _, m, n = q.shape
    for q_matrix, scale_matrix, z_matrix in zip(as_stored(q), scales, z, strict=True):
        cast_args = (q_matrix, scale_matrix, z_matrix, m, n, *scale_matrix.stride())
        _cast((triton.cdiv(m, CAST_M), triton.cdiv(n, 128)), cast_args, (CAST_M,), num_warps=4)


def _epilogue_strides(bias: Tensor | None, c: Tensor | None) -> tuple[int, ...]:
    return (0 if bias is None else bias.stride(0), *((0, 0, 0) if c is None else c.stride()))


def _multiply(d: Tensor, args: ScaledMatmulArgs, splits: int, config: Config) -> None:
    """Launches the GEMM once; `d` has a batch for each part of K."""
    a, b, scale_a, scale_b, bias, c, alpha, activation, _ = args
    batch, m, k = a.shape
    n = b.shape[2]
    arch = target_of(a)
    strides, descriptors = (*d.stride()[:2], *a.stride(), *b.stride()), False
    # The bucket speaks of a and b; d may be strided by its caller, or hold partial products of odd rows
    along_k = major_a(a) is Major.K and major_b(b) is Major.K
    if config.descriptors and along_k and all(map(copyable, (d, a, b))) and has_descriptors(arch):
        strides, descriptors = (*pitches(d, 1), *pitches(a, 1), 1, pitches(b, 2)[0], 1, pitches(b, 2)[1]), True
    a_stored, b_stored = as_stored(a), as_stored(b)
    decodes = a_stored.dtype == torch.uint8  # in registers, of which eight warps have twice as many
    if arch.startswith("gfx"):  # scales leave scalar registers for fewer stages
        config = config._replace(num_stages=1 if decodes or c is not None else 2)
    elif decodes:
        config = config._replace(num_warps=8)
    fit = fitted(config, arch, a.element_size(), d.element_size(), c, activation)
    config = fit.config
    tiles = splits * batch * triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    grid = (max(1, min(tiles, fit.programs * usable_sms(a.device))),)
    kernel_args = (
        d, a_stored, b_stored, scale_a, scale_b, bias, c, alpha, batch, m, n, k, splits,
        *strides, *scale_a.stride(), *scale_b.stride(), *_epilogue_strides(bias, c),
    )  # fmt: skip
    constants = (
        int(scaling_of(a, b, scale_a, scale_b)), activation, descriptors,
        vector_width(a, k) if along_k else 1, vector_width(b, k) if along_k else 1, vector_width_of_c(c),
        vector_width(d, d.shape[2]),
        splits > 1, k % DEEP == 0, needs_wide_offsets(d, a, b, c), config.group_m, fit.parts,
        config.block_m, config.block_n,
    )  # fmt: skip
    # Triton keeps descriptors in memory that it asks an allocator for; the caller's own allocator stays in force
    context = copy_context()
    context.run(triton.set_allocator, allocate_descriptors)
    context.run(_gemm, grid, kernel_args, constants, num_warps=config.num_warps, num_stages=config.num_stages)


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: ScaledMatmulArgs, config: Config) -> None:
    gemm(outs[0].unsqueeze(0), as_batch("scaled_matmul", args), config)


@register_kernel(
    FORWARD_FP8, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch_fp8(outs: tuple[Tensor, Tensor], args: ScaledMatmulFp8Args, config: Config) -> None:
    q, scales = outs
    product_args = as_batch("scaled_matmul_fp8", with_result(args, torch.float32))
    gemm_fp8(q.unsqueeze(0), scales.unsqueeze(0), product_args, config)
