"""Scaled float8 GEMM in Triton: the portable form, for any strides, alignment and sizes, on NVIDIA and AMD.

A persistent kernel as in `tile_triton.py`, with K split if rows are few.  Each 128 of K are one `tl.dot` from zero,
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
from tilewright.ops.gemm.scaled.scaling import Scaling, scaling_of
from tilewright.ops.quant.triton_numbers import as_stored

DEEP = 128  # block_k of every config
CAST_M = 8  # rows of a program of the cast


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """Returns the largest tile that still gives FILL tiles; up to 64 rows get narrow ones, with K split."""
    m, n, k, _, is_aligned, *_ = bucket
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
    buckets = product((1, 64, 128, 4096), powers, powers, (0,), (0, 1))
    return tuple(dict.fromkeys(configure(bucket, torch.float8_e4m3fn) for bucket in buckets))


CONFIGS = _configured()


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns tiles of up to 128x128, the largest whose two accumulators fit the registers."""
    m, _, k, _, is_aligned, *_ = bucket
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
        Config(*tile[:2], DEEP, tile[2], stages, band, form, 1)
        for tile, stages, band, form in product(tiles, (3, 4), (4, 8), forms)
    )


def why_not(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *rest: object) -> str | None:
    """Why this engine cannot run these scales; None if it can."""
    if scaling_of(a, b, scale_a, scale_b) is Scaling.OTHER:
        return (
            "multiplies operands that are scaled by tensor, by row and column, 1x128 by 128x128, or 1x128 by 1x128; "
            f"got scales {tuple(scale_a.shape)} and {tuple(scale_b.shape)}"
        )
    return None


why_not_fp8 = why_not

_gemm = TritonKernel(scaled_gemm_kernel)
_cast = TritonKernel(cast_kernel)


def gemm(
    d: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    alpha: float,
    activation: str,
    config: Config,
) -> None:
    """d (B, M, N_out) = act(alpha * (a * scale_a) @ (b * scale_b) + bias) + c; see `scaled_registration.py`."""
    batch, m, k = a.shape
    n = b.shape[2]
    blocks = triton.cdiv(k, DEEP)
    splits = triton.cdiv(blocks, triton.cdiv(blocks, config.splits))  # no part of K is empty
    scaled = (a, b, scale_a, scale_b)
    if splits == 1:
        _multiply(d, scaled, bias, c, alpha, activation, 1, config)
        return
    partials = scratch((splits * batch, m, n), torch.float32, d.device)
    _multiply(partials, scaled, None, None, 1.0, "", splits, config)
    grid = (batch * triton.cdiv(m, REDUCE_M) * triton.cdiv(n, REDUCE_N),)
    args = (d, partials, bias, c, None, alpha, batch, m, n, splits, *d.stride()[:2], *_finish_strides(bias, c))
    reduce_parts(grid, args, (activation, needs_wide_offsets(d, c), REDUCE_M, REDUCE_N), num_warps=4)


def gemm_fp8(
    q: Tensor,
    scales: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    alpha: float,
    activation: str,
    config: Config,
) -> None:
    """q (B, M, N_out) and scales (B, M, groups of 128) of the same result; see `scaled_registration.py`."""
    z = scratch(q.shape, torch.float32, q.device)
    gemm(z, a, b, scale_a, scale_b, bias, None, alpha, activation, config)
    _, m, n = q.shape
    for of_q, of_scales, of_z in zip(as_stored(q), scales, z, strict=True):
        args = (of_q, of_scales, of_z, m, n, *of_scales.stride())
        _cast((triton.cdiv(m, CAST_M), triton.cdiv(n, 128)), args, (CAST_M,), num_warps=4)


def _finish_strides(bias: Tensor | None, c: Tensor | None) -> tuple[int, ...]:
    return (0 if bias is None else bias.stride(0), *((0, 0, 0) if c is None else c.stride()))


def _multiply(
    d: Tensor,
    scaled: tuple[Tensor, Tensor, Tensor, Tensor],
    bias: Tensor | None,
    c: Tensor | None,
    alpha: float,
    activation: str,
    splits: int,
    config: Config,
) -> None:
    """One launch of the GEMM; `d` has a batch for each part of K."""
    a, b, scale_a, scale_b = scaled
    batch, m, k = a.shape
    n = b.shape[2]
    arch = target_of(a)
    strides, descriptors = (*d.stride()[:2], *a.stride(), *b.stride()), False
    # The bucket speaks of a and b; d may be strided by its caller, or hold partial products of odd rows
    along_k = major_a(a) is Major.K and major_b(b) is Major.K
    if config.descriptors and along_k and all(map(copyable, (d, a, b))) and has_descriptors(arch):
        strides, descriptors = (*pitches(d, 1), *pitches(a, 1), 1, pitches(b, 2)[0], 1, pitches(b, 2)[1]), True
    of_a, of_b = as_stored(a), as_stored(b)
    decodes = of_a.dtype == torch.uint8  # in registers, of which eight warps have twice as many
    if arch.startswith("gfx"):  # scales leave scalar registers for fewer stages
        config = config._replace(num_stages=1 if decodes or c is not None else 2)
    elif decodes:
        config = config._replace(num_warps=8)
    fit = fitted(config, arch, a.element_size(), d.element_size(), c, activation)
    config = fit.config
    tiles = splits * batch * triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    grid = (max(1, min(tiles, fit.programs * usable_sms(a.device))),)
    args = (
        d, of_a, of_b, scale_a, scale_b, bias, c, alpha, batch, m, n, k, splits,
        *strides, *scale_a.stride(), *scale_b.stride(), *_finish_strides(bias, c),
    )  # fmt: skip
    constants = (
        int(scaling_of(*scaled)), activation, descriptors,
        vector_width(a, k) if along_k else 1, vector_width(b, k) if along_k else 1, vector_width_of_c(c),
        vector_width(d, d.shape[2]),
        splits > 1, k % DEEP == 0, needs_wide_offsets(d, a, b, c), config.band, fit.parts,
        config.block_m, config.block_n,
    )  # fmt: skip
    # Triton keeps descriptors in memory that it asks an allocator for; the caller's own allocator stays in force
    context = copy_context()
    context.run(triton.set_allocator, allocate_descriptors)
    context.run(_gemm, grid, args, constants, num_warps=config.num_warps, num_stages=config.num_stages)
