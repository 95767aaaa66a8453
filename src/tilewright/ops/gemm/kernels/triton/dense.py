"""Dense products in Triton, matmul and bmm: the portable form, for any strides, alignment and sizes, on NVIDIA and AMD.

As many programs as the GPU holds at once take output tiles in grouped order, so that tiles in flight share rows of A
and columns of B in L2.  The loops over tiles and along K are flattened, so that loads of the next tile overlap the
epilogue.  Operands are read through pointers and masks or, if the bucket is aligned and the GPU has TMA (sm_90 and
later), through tensor descriptors.  Few rows make too few tiles to fill a GPU: then K is split, each part writes a
float32 partial product, and a second launch adds them in a fixed order.  Tiles of one row (block_m 1) use
`single_row.py`.

2*M*N*K flops; (M*K + K*N) * itemsize + M*N*itemsize_out bytes.  8192^3 in bf16 cannot beat 1.11 ms at 989 TFLOP/s,
16x4096x7168 not 14 us at 4.2 TB/s.
"""

import re
from contextvars import copy_context
from itertools import product

import torch
import triton
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel, target_of
from tilewright.ops.gemm.bmm import FORWARD as BMM
from tilewright.ops.gemm.dense.args import BmmBucket, MatmulArgs, MatmulBucket, as_batch
from tilewright.ops.gemm.kernels.triton import single_row
from tilewright.ops.gemm.kernels.triton.dense_kernel import gemm_kernel, reduce_kernel
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
from tilewright.ops.gemm.matmul import FORWARD as MATMUL
from tilewright.ops.gemm.operands import Major, copyable, major_a, major_b

FILL = 128  # tiles that keep a large GPU busy; the configuration may not depend on the GPU at hand
REDUCE_M, REDUCE_N = 4, 256  # tile of a program of the reduction


def configure(bucket: MatmulBucket | BmmBucket, dtype: torch.dtype) -> Config:
    """Returns the largest tile that still gives FILL tiles; for up to 64 rows narrow tiles, with K split.

    Unaligned operands are read element by element, and each address takes a register pair: smaller tiles.
    float32 runs as FMAs in tiles of 64x64: NVIDIA's tensor cores would round it to TF32.
    """
    m, n, k, is_aligned = bucket.M, bucket.N, bucket.K, bucket.aligned
    if dtype.itemsize == 4:
        return Config(16, 64, 32, 4, 3, 8, False, 1) if m <= 16 else Config(64, 64, 16, 4, 3, 8, False, 1)
    if m <= 64:
        # Rows beyond M cost no traffic.  128 along K keeps more bytes in flight
        rows, tiles, splits = 16 if m <= 16 else 64, -(-n // 64), 1
        while splits < 8 and 2 * splits * tiles <= FILL + 4 and k >= 1024 * splits:
            splits *= 2
        return (
            Config(rows, 64, 128, 4, 4, 8, True, splits) if is_aligned else Config(rows, 64, 64, 4, 3, 8, False, splits)
        )
    deep = 128 // dtype.itemsize  # one row of the TMA swizzle
    tiles = -(-m // 128) * -(-n // 128)
    if not is_aligned:
        return Config(64, 64, 32, 4, 3, 8, False, 1) if tiles < FILL else Config(128, 128, 32, 8, 3, 8, False, 1)
    if tiles < FILL:
        return Config(64, 128, deep, 4, 4, 8, True, 1)
    if tiles < 3 * FILL or dtype.itemsize == 1:
        # Promotion of float8 needs a second accumulator: no room for 256 columns
        return Config(128, 128, deep, 8, 4, 8, True, 1)
    return Config(128, 256, deep, 8, 4, 8, True, 1)


def configured(*dtypes: torch.dtype) -> tuple[Config, ...]:
    """Returns every result of `configure` for operands of `dtypes`."""
    powers = [1 << i for i in range(6, 15)]
    sizes = product((1, 64, 128, 1024, 4096), powers, powers, (0, 1))
    buckets = [MatmulBucket(m, n, k, 0, is_aligned, 16, 0) for m, n, k, is_aligned in sizes]
    return tuple(dict.fromkeys(configure(bucket, dtype) for bucket in buckets for dtype in dtypes))


CONFIGS = configured(torch.bfloat16, torch.float32)


def candidates(bucket: MatmulBucket | BmmBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns tiles of up to 128x256 or 256x128 whose accumulator leaves half of the registers free; at most 64."""
    m, k, is_aligned = bucket.M, bucket.K, bucket.aligned
    deep = 128 // dtype.itemsize
    if dtype.itemsize == 4:
        exact = ((16, 64, 32, 4), (32, 64, 32, 4), (64, 32, 32, 4), (64, 64, 16, 4), (64, 64, 32, 4), (64, 64, 32, 8))
        return tuple(Config(*tile, stages, 8, False, 1) for tile in exact for stages in (2, 3))
    forms = (True, False) if is_aligned else (False,)
    single = tuple(single_row.candidates()) if m == 1 else ()
    if m <= 64:
        space = product((32, 64, 128), (deep, 2 * deep), (4, 6), forms, (1, 2, 4, 8))
        rows = max(m, 16)
        tiles_of_rows = (
            Config(rows, n, block_k, 4, stages, 8, form, splits)
            for n, block_k, stages, form, splits in space
            if stages * (rows + n) * block_k * dtype.itemsize <= 160 << 10
            and (splits == 1 or k >= 4 * splits * block_k)
        )
        return (*single, *tiles_of_rows)[:63]  # the tuner also tries the default, which may not be among them
    tiles = [(64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8)]
    if dtype.itemsize == 2:
        tiles += [(64, 256, 4), (128, 256, 8), (256, 128, 8)]
    return tuple(
        Config(*tile[:2], deep, tile[2], stages, group_m, form, 1)
        for tile, stages, group_m, form in product(tiles, (3, 4), (4, 8), forms)
    )


def why_not(args: MatmulArgs) -> str | None:
    """Why Triton cannot run these arguments on this GPU; None if it can."""
    arch = target_of(args.a)
    if args.a.dtype is torch.float8_e4m3fn and re.fullmatch(r"sm_8[0-8]", arch):
        return f"multiplies float8_e4m3fn from sm_89 on, and this is {arch}"
    return None


_gemm = TritonKernel(gemm_kernel)
reduce_parts = TritonKernel(reduce_kernel)


def gemm(d: Tensor, args: MatmulArgs, config: Config) -> None:
    """d = act(alpha * scale * a @ b + bias) + c, of any strides with a unit one among the last two of a and b.

    d: (B, M, N_out), contiguous along N_out; a: (B, M, K); b: (B, K, N); c: (B, M, N_out), may be d.
    """
    a, b, bias, c, scale, alpha, activation, _ = args
    batch, m, k = a.shape
    n = b.shape[2]
    blocks = triton.cdiv(k, config.block_k)
    splits = triton.cdiv(blocks, triton.cdiv(blocks, config.splits))  # no part of K is empty
    c_strides = (0, 0, 0) if c is None else c.stride()
    epilogue = (bias, c, scale, alpha)
    epilogue_strides = (0 if bias is None else bias.stride(0), *c_strides)
    if config.block_m == 1:
        single_row.gemm(d, a, b, epilogue, epilogue_strides, activation, config)
        return
    if splits == 1:
        _multiply(d, a, b, epilogue, epilogue_strides, activation, 1, config)
        return
    partials = scratch((splits * batch, m, n), torch.float32, d.device)
    _multiply(partials, a, b, (None, None, None, 1.0), (0, 0, 0, 0), "", splits, config)
    grid = (batch * triton.cdiv(m, REDUCE_M) * triton.cdiv(n, REDUCE_N),)
    int64_offsets = needs_wide_offsets(d, c)
    reduce_args = (d, partials, *epilogue, batch, m, n, splits, *d.stride()[:2], *epilogue_strides)
    reduce_parts(grid, reduce_args, (activation, int64_offsets, REDUCE_M, REDUCE_N), num_warps=4)


def _multiply(
    d: Tensor,
    a: Tensor,
    b: Tensor,
    epilogue: tuple[Tensor | None, Tensor | None, Tensor | None, float],
    epilogue_strides: tuple[int, ...],
    activation: str,
    splits: int,
    config: Config,
) -> None:
    """Launches the GEMM once; `d` has a batch for each part of K."""
    batch, m, k = a.shape
    n, c = b.shape[2], epilogue[1]
    arch = target_of(a)
    a_major, b_major = major_a(a), major_b(b)
    strides, descriptors = (*d.stride()[:2], *a.stride(), *b.stride()), False
    # The bucket covers a and b; d may have strides of the caller, or hold partial products of odd rows
    expressible = a_major is not None and b_major is not None and all(map(copyable, (d, a, b)))
    if config.descriptors and expressible and has_descriptors(arch):
        a_pitch, b_pitch = pitches(a, 1 if a_major is Major.K else 2), pitches(b, 2 if b_major is Major.K else 1)
        strides, descriptors = (*pitches(d, 1), *a_pitch, a_pitch[1], *b_pitch, b_pitch[1]), True
    fit = fitted(config, arch, a.element_size(), d.element_size(), c, activation)
    config = fit.config
    tiles = splits * batch * triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    grid = (max(1, min(tiles, fit.programs * usable_sms(a.device))),)
    args = (d, a, b, *epilogue, batch, m, n, k, splits, *strides, *epilogue_strides)
    constants = (
        activation, descriptors, a_major is Major.K, b_major is Major.K,
        vector_width(a, k if a_major is Major.K else m), vector_width(b, k if b_major is Major.K else n),
        vector_width_of_c(c), vector_width(d, d.shape[2]),
        splits > 1, k % config.block_k == 0, needs_wide_offsets(d, a, b, c), config.group_m, fit.parts, *config[:3],
    )  # fmt: skip
    # Triton allocates memory for descriptors; the context keeps the caller's allocator in force
    context = copy_context()
    context.run(triton.set_allocator, allocate_descriptors)
    context.run(_gemm, grid, args, constants, num_warps=config.num_warps, num_stages=config.num_stages)


@register_kernel(
    MATMUL, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: MatmulArgs, config: Config) -> None:
    gemm(outs[0].unsqueeze(0), as_batch(args), config)


@register_kernel(BMM, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not)
def launch_batch(outs: tuple[Tensor], args: MatmulArgs, config: Config) -> None:
    gemm(outs[0], args, config)
