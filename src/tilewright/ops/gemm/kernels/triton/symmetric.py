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
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.triton_launch import TritonKernel, target_of
from tilewright.ops.gemm.kernels.triton.dense import FILL
from tilewright.ops.gemm.kernels.triton.symmetric_kernel import symmetric_kernel
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
_MANY, _LONG = Config(128, 64, 8, 5, 8, True), Config(128, 64, 4, 4, 8, True)
CONFIGS = (_FLOAT32, _UNALIGNED, _FEW, _MANY, _LONG)


def configure(bucket: SymmetricBucket, dtype: torch.dtype) -> Config:
    """Returns tiles of 128, or of 64 where those are too few to fill a GPU.

    4096x4096x14336 takes 0.342 ms in 4 warps, 0.376 in 8, both of 4 stages; 4096x4096x4096 takes 0.129 ms in 4 warps
    and 0.114 in 8 of 5 stages.  cuBLAS takes 0.678 and 0.177 ms for all of the product (H200, 2026-11).
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
    if arch.startswith("gfx") and config.block == 128:  # four warps of 64 threads with this tile spill
        config = config._replace(num_warps=8)
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
    most = 2 if arch.startswith("gfx") else config.num_stages  # its scalar registers hold two
    stages = max(1, min(most, (shared - staging) // stage + in_registers))
    return stages, max(1, shared // (stages * stage + staging))
