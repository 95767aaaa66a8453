"""Symmetric products in Triton, symmetric_matmul: square tiles on and under the diagonal, each also stored transposed.

As many programs as the GPU holds at once take tiles in groups of rows, so that tiles in flight share operands in L2; a
tile of the diagonal is mirrored in itself.  Only the program that writes an element of the lower triangle reads c
there, so d may be c.

M*(M+1)*K flops instead of 2*M*M*K; M*K*itemsize read, M*M*itemsize written.  4096x4096x14336 in bf16 cannot beat
0.24 ms at 989 TFLOP/s.
"""

from contextvars import copy_context
from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.triton_launch import TritonKernel, target_of
from tilewright.ops.gemm.kernels.triton.dense import FILL
from tilewright.ops.gemm.kernels.triton.dense_kernel import _dot_acc, _load, _multiple, _offsets, _store
from tilewright.ops.gemm.kernels.triton.tiles import (
    SHARED_BYTES,
    SHARED_ELSEWHERE,
    allocate_descriptors,
    has_descriptors,
    needs_wide_offsets,
    pitches,
    vector_width,
    vector_width_of_c,
)
from tilewright.ops.gemm.operands import copyable
from tilewright.ops.gemm.symmetric_matmul import FORWARD, SymmetricArgs, SymmetricBucket, along_k
from tilewright.ops.rows import no_float64


class Config(NamedTuple):
    """block: rows and columns of a tile.   group: tile rows in a group of the tile order.   descriptors: TMA if there
    is one.   num_stages is what an H200 gets; less where shared memory is smaller.
    """

    block: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int
    descriptors: bool


_FLOAT32 = Config(64, 16, 4, 3, 8, False)  # FMAs: NVIDIA's tensor cores would round to TF32
_UNALIGNED, _FEW = Config(64, 32, 4, 3, 8, False), Config(64, 64, 4, 4, 8, True)
_MANY, _LONG = Config(128, 64, 8, 5, 8, True), Config(128, 64, 8, 4, 16, True)
CONFIGS = (_FLOAT32, _UNALIGNED, _FEW, _MANY, _LONG)


def configure(bucket: SymmetricBucket, dtype: torch.dtype) -> Config:
    """Returns tiles of 128, or of 64 where those are too few to fill a GPU.

    4096x4096x14336 takes 0.373 ms in 4 stages and 0.399 in 5, 4096x4096x4096 takes 0.118 and 0.114 ms.  Four warps take
    0.342 and 0.129 ms, and spill.  cuBLAS takes 0.678 and 0.177 ms for all of the product (H200, 2026-11).
    """
    if dtype.itemsize == 4:
        return _FLOAT32
    if not bucket.aligned:
        return _UNALIGNED
    tiles = -(-bucket.M // 128)
    if bucket.B * tiles * (tiles + 1) // 2 < FILL:
        return _FEW
    return _LONG if bucket.K >= 8192 else _MANY


def candidates(bucket: SymmetricBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns tiles of 64 and 128 whose accumulator leaves half of the registers free."""
    if dtype.itemsize == 4:
        return tuple(Config(block, 16, 4, stages, 8, False) for block in (32, 64) for stages in (2, 3))
    forms = (True, False) if bucket.aligned else (False,)
    tiles = ((64, 4), (128, 4), (128, 8))
    return tuple(
        Config(block, 64, warps, stages, group, form)
        for (block, warps), stages, group, form in product(tiles, (4, 5), (4, 8, 16), forms)
    )


@triton.jit
def _triangle_row(index):
    """The row of an element of a triangle whose elements are counted row by row: row (row + 1) / 2 <= index."""
    row = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > index, row - 1, row)  # the root may be off by a rounding
    return tl.where((row + 1) * (row + 2) // 2 <= index, row + 1, row)


@triton.jit
def _tile_coordinates(index, tiles, GROUP: tl.constexpr):
    """-> tile row, tile column <= tile row.  GROUP tile rows at a time: their square columns one by one, then the
    triangle that ends them.
    """
    first = _triangle_row(index) // GROUP * GROUP
    rows = tl.minimum(tiles - first, GROUP)
    place = index - first * (first + 1) // 2
    corner = tl.maximum(place - first * rows, 0)
    corner_row = _triangle_row(corner)
    corner_col = corner - corner_row * (corner_row + 1) // 2
    square = place < first * rows
    return first + tl.where(square, place % rows, corner_row), tl.where(square, place // rows, first + corner_col)


@triton.jit
def symmetric_kernel(
    d, a, b, c, alpha, beta,  # d, c: (B, M, M)   a, b: (B, M, K)   contiguous along the last
    B, M, K, stride_db, stride_dm, stride_ab, stride_am, stride_bb, stride_bm, stride_cb, stride_cm,
    DESCRIPTORS: tl.constexpr, VECTOR_A: tl.constexpr, VECTOR_C: tl.constexpr, VECTOR_D: tl.constexpr,
    EVEN_K: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes the lower triangle of d = alpha * a @ b^T + beta * c, tile by tile, and mirrors it."""
    # Tell the compiler what is a multiple of 16 bytes
    K = _multiple(K, VECTOR_A)
    stride_ab = _multiple(stride_ab, VECTOR_A)
    stride_am = _multiple(stride_am, VECTOR_A)
    stride_bb = _multiple(stride_bb, VECTOR_A)
    stride_bm = _multiple(stride_bm, VECTOR_A)
    stride_db = _multiple(stride_db, VECTOR_D)
    stride_dm = _multiple(stride_dm, VECTOR_D)
    M_d = _multiple(M, VECTOR_D)
    if DESCRIPTORS:
        a_desc = tl.make_tensor_descriptor(a, [B, M, K], [stride_ab, stride_am, 1], [1, BLOCK, BLOCK_K])
        b_desc = tl.make_tensor_descriptor(b, [B, M, K], [stride_bb, stride_bm, 1], [1, BLOCK, BLOCK_K])
        d_desc = tl.make_tensor_descriptor(d, [B, M, M_d], [stride_db, stride_dm, 1], [1, BLOCK, BLOCK])
    tiles = tl.cdiv(M, BLOCK)
    tiles_per_product = tiles * (tiles + 1) // 2

    for tile in tl.range(tl.program_id(0), B * tiles_per_product, tl.num_programs(0), flatten=True):
        batch = tile // tiles_per_product
        tile_m, tile_n = _tile_coordinates(tile % tiles_per_product, tiles, GROUP)
        row = tile_m * BLOCK
        col = tile_n * BLOCK

        # Accumulate along K
        acc = tl.zeros((BLOCK, BLOCK), tl.float32)
        for k_block in range(tl.cdiv(K, BLOCK_K)):
            start = k_block * BLOCK_K
            if DESCRIPTORS:
                x = a_desc.load([batch, row, start]).reshape(BLOCK, BLOCK_K)
                y = b_desc.load([batch, col, start]).reshape(BLOCK, BLOCK_K).T
            else:
                a_ptr = a + (batch.to(tl.int64) * stride_ab + row.to(tl.int64) * stride_am + start)
                b_ptr = b + (batch.to(tl.int64) * stride_bb + col.to(tl.int64) * stride_bm + start)
                offs = _offsets(BLOCK, WIDE)
                offs_k = tl.arange(0, BLOCK_K)
                x = _load(a_ptr, offs[:, None], offs_k[None, :], M - row, K - start, stride_am, 1, True, EVEN_K)
                y = _load(b_ptr, offs[None, :], offs_k[:, None], M - col, K - start, stride_bm, 1, True, EVEN_K)
            acc = _dot_acc(acc, x, y, 0)

        # Scale, add c, and mirror the diagonal tile in itself
        value = acc * alpha
        offs_m = _offsets(BLOCK, WIDE)[:, None]
        offs_n = _offsets(BLOCK, WIDE)[None, :]
        if c is not None:
            stride_cb = _multiple(stride_cb, VECTOR_C)
            stride_cm = _multiple(stride_cm, VECTOR_C)
            c_ptr = c + (batch.to(tl.int64) * stride_cb + row.to(tl.int64) * stride_cm + col)
            mask = (offs_m < M - row) & (offs_n < _multiple(M, VECTOR_C) - col)
            value += beta * tl.load(c_ptr + (offs_m * stride_cm + offs_n), mask=mask, other=0.0).to(tl.float32)
        value = value.to(d.dtype.element_ty)
        mirror = tl.trans(value)
        off_diagonal = tile_m > tile_n
        lower = tl.where(off_diagonal | (offs_m >= offs_n), value, mirror)
        upper = tl.where(off_diagonal | (offs_m <= offs_n), mirror, value)  # of the diagonal the same as lower

        if DESCRIPTORS:
            d_desc.store([batch, row, col], lower.reshape(1, BLOCK, BLOCK))
            d_desc.store([batch, col, row], upper.reshape(1, BLOCK, BLOCK))
        else:
            _store(d, lower, batch, row, col, M, M_d, stride_db, stride_dm, WIDE)
            _store(d, upper, batch, col, row, M, M_d, stride_db, stride_dm, WIDE)


_kernel = TritonKernel(symmetric_kernel)


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates,
    why_not=lambda args: no_float64(*args),
)  # fmt: skip
def launch(outs: tuple[Tensor], args: SymmetricArgs, config: Config) -> None:
    (d,), (a, b, c, alpha, beta) = outs, args
    b = a if b is None else b
    batch, m, k = a.shape
    arch = target_of(a)
    strides, descriptors = (*d.stride()[:2], *a.stride()[:2], *b.stride()[:2]), False
    # The bucket covers a and b; d may have strides of the caller
    if config.descriptors and along_k(a, b) and all(map(copyable, (d, a, b))) and has_descriptors(arch):
        strides, descriptors = (*pitches(d, 1), *pitches(a, 1), *pitches(b, 1)), True
    stages, programs = _fitted(config, arch, a.element_size())
    tiles = triton.cdiv(m, config.block)
    grid = (max(1, min(batch * tiles * (tiles + 1) // 2, programs * usable_sms(a.device))),)
    values = (d, a, b, c, alpha, beta, batch, m, k, *strides, *((0, 0) if c is None else c.stride()[:2]))
    constants = (
        descriptors, min(vector_width(a, k), vector_width(b, k)), vector_width_of_c(c), vector_width(d, m),
        k % config.block_k == 0, needs_wide_offsets(d, a, b, c), config.group, config.block, config.block_k,
    )  # fmt: skip
    # Triton allocates memory for descriptors; the context keeps the caller's allocator in force
    context = copy_context()
    context.run(triton.set_allocator, allocate_descriptors)
    context.run(_kernel, grid, values, constants, num_warps=config.num_warps, num_stages=stages)


def _fitted(config: Config, arch: str, itemsize: int) -> tuple[int, int]:
    """Stages that fit the shared memory of `arch`, beside a tile and its mirror, and programs that an SM holds."""
    shared = SHARED_BYTES.get(arch, SHARED_ELSEWHERE)
    stage, staging = 2 * config.block * config.block_k * itemsize, 2 * config.block**2 * itemsize
    in_registers = 0 if has_descriptors(arch) else 1  # operands come from registers, which hold the oldest stage
    most = 2 if arch.startswith("gfx") else config.num_stages  # its scalar registers hold the masks of no more
    stages = max(1, min(most, (shared - staging) // stage + in_registers))
    return stages, max(1, shared // (stages * stage + staging))
