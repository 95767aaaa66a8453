"""Int8 products in Triton: the portable form, for any alignment and sizes, on NVIDIA and AMD.

A persistent kernel as in `dense.py`, with int32 accumulators and the scales in its epilogue.  If rows are few, K is
split, each part writes int32 sums, and a second launch adds them: integers, in any order the same.

2*M*N*K operations; M*K + N*K bytes of operands + M*N*itemsize_out.  16x4096x4096 cannot beat 4.0 us at 4.2 TB/s.
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
from tilewright.ops.gemm.int8_matmul import FORWARD, Int8MatmulArgs, Int8MatmulBucket, along_k
from tilewright.ops.gemm.kernels.triton.dense import FILL, REDUCE_M, REDUCE_N
from tilewright.ops.gemm.kernels.triton.int8_kernel import int8_gemm_kernel, int8_reduce_kernel
from tilewright.ops.gemm.kernels.triton.tiles import (
    Config,
    allocate_descriptors,
    fitted,
    has_descriptors,
    needs_wide_offsets,
    pitches,
    vector_width,
)
from tilewright.ops.gemm.operands import copyable

DEEP = 128  # one row of the TMA swizzle, in elements


def configure(bucket: Int8MatmulBucket, dtype: torch.dtype) -> Config:
    """Returns the largest tile that still gives FILL tiles; up to 64 rows get 32 columns, read through pointers, with
    long K split.

    Of few rows descriptors cost more than they save: 64x6144x4096 takes 14.3 us without and 18.7 us with them, and of
    512 rows tiles of 64 gain a sixth over those of 128 (H100, 2026-11).  Unaligned operands, read byte by byte, have
    few configs.
    """
    m, n, k, is_aligned = bucket.M, bucket.N, bucket.K, bucket.aligned
    if m <= 64:
        block_m, splits = 16 if m <= 16 else 64, 1
        if not is_aligned:
            return Config(block_m, 64, DEEP, 4, 3, 8, False, 1)
        while splits < 4 and -(-n // 32) <= FILL + 4 and k >= 4096 * splits:
            splits *= 2
        return Config(block_m, 32, DEEP, 4, 4, 8, False, splits)
    if not is_aligned:
        return Config(64, 64, DEEP, 4, 3, 8, False, 1)
    tiles = -(-m // 128) * -(-n // 128)
    if m <= 512 or tiles < FILL:
        return Config(64, 128, DEEP, 4, 4, 8, True, 1)
    return Config(128, 128 if tiles < 3 * FILL else 256, DEEP, 8, 4, 8, True, 1)


def _configured() -> tuple[Config, ...]:
    powers = [1 << i for i in range(6, 15)]
    sizes = product((1, 64, 128, 1024, 4096), powers, powers, (0, 1))
    buckets = [Int8MatmulBucket(m, n, k, is_aligned, 16, 0) for m, n, k, is_aligned in sizes]
    return tuple(dict.fromkeys(configure(bucket, torch.int8) for bucket in buckets))


CONFIGS = _configured()


def candidates(bucket: Int8MatmulBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns tiles of up to 128x256 or 256x128 whose accumulator leaves half of the registers free; at most 64."""
    m, k, is_aligned = bucket.M, bucket.K, bucket.aligned
    forms = (True, False) if is_aligned else (False,)
    if m <= 64:
        space = product((32, 64, 128), (DEEP, 2 * DEEP), (4, 6), forms, (1, 2, 4, 8))
        rows = max(m, 16)
        return tuple(
            Config(rows, n, block_k, 4, stages, 8, form, splits)
            for n, block_k, stages, form, splits in space
            if stages * (rows + n) * block_k <= 160 << 10 and (splits == 1 or k >= 4 * splits * block_k)
        )[:63]  # the tuner also tries the default, which may not be among them
    tiles = ((64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (64, 256, 4), (128, 256, 8), (256, 128, 8))
    return tuple(
        Config(*tile[:2], DEEP, tile[2], stages, group_m, form, 1)
        for tile, stages, group_m, form in product(tiles, (3, 4), (4, 8), forms)
    )


# No FMA: the reference rounds the product of the scales, then the sum with the bias
_gemm = TritonKernel(int8_gemm_kernel, enable_fp_fusion=False)
_reduce = TritonKernel(int8_reduce_kernel, enable_fp_fusion=False)


@register_kernel(FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates)
def launch(outs: tuple[Tensor], args: Int8MatmulArgs, config: Config) -> None:
    (d,) = outs
    (m, k), n = args.a.shape, args.b.shape[0]
    blocks = triton.cdiv(k, config.block_k)
    splits = triton.cdiv(blocks, triton.cdiv(blocks, config.splits))  # no part of K is empty
    if splits == 1:
        _multiply(d.unsqueeze(0), args, config)
        return
    partials = scratch((splits, m, n), torch.int32, d.device)
    _multiply(partials, args, config)
    grid = (triton.cdiv(m, REDUCE_M) * triton.cdiv(n, REDUCE_N),)
    values = (d, partials, args.scale_a, args.scale_b, args.bias, m, n, splits, d.stride(0), *_vector_strides(args))
    _reduce(grid, values, (args.activation, needs_wide_offsets(d.unsqueeze(0)), REDUCE_M, REDUCE_N), num_warps=4)


def _vector_strides(args: Int8MatmulArgs) -> tuple[int, int, int]:
    return args.scale_a.stride(0), args.scale_b.stride(0), 0 if args.bias is None else args.bias.stride(0)


def _multiply(d: Tensor, args: Int8MatmulArgs, config: Config) -> None:
    """Launches the GEMM once; d is (1, M, N_out), or has the int32 sums (splits, M, N)."""
    a, b = args.a.unsqueeze(0), args.b.unsqueeze(0)
    (_, m, k), n, splits = a.shape, b.shape[1], d.shape[0]
    activation = args.activation if splits == 1 else ""
    arch = target_of(a)
    strides, descriptors = (*d.stride()[:2], a.stride(1), b.stride(1)), False
    # The bucket speaks of a and b; d may be strided by its caller, or hold sums of odd rows
    if config.descriptors and along_k(a, b) and all(map(copyable, (d, a, b))) and has_descriptors(arch):
        strides, descriptors = (*pitches(d, 1), pitches(a, 1)[1], pitches(b, 1)[1]), True
    if arch.startswith("gfx"):  # 256 columns with their scales spill
        config = config._replace(block_n=min(config.block_n, 128))
    fit = fitted(config, arch, a.element_size(), d.element_size(), None, activation)
    config = fit.config
    tiles = splits * triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    grid = (max(1, min(tiles, fit.programs * usable_sms(a.device))),)
    values = (
        d,
        args.a,
        args.b,
        args.scale_a,
        args.scale_b,
        args.bias,
        m,
        n,
        k,
        splits,
        *strides,
        *_vector_strides(args),
    )
    constants = (
        activation, descriptors, vector_width(a, k), vector_width(b, k), vector_width(d, d.shape[2]),
        splits > 1, k % config.block_k == 0, needs_wide_offsets(d, a, b), config.group_m, fit.parts, *config[:3],
    )  # fmt: skip
    # Triton keeps descriptors in memory that it asks an allocator for; the caller's own allocator stays in force
    context = copy_context()
    context.run(triton.set_allocator, allocate_descriptors)
    context.run(_gemm, grid, values, constants, num_warps=config.num_warps, num_stages=config.num_stages)
