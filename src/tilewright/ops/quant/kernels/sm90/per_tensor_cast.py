"""per_tensor_cast_to_fp8 in CUDA C++ for Hopper: what registers and shared memory hold of x is read once.

Every multiprocessor has one block, which keeps 384 KB of x between the pass that finds the maximum and the pass that
casts: 52 MB on 132 of them.  Of a larger x the rest is read twice, the second time from the end, where the L2 still has
it.  Between the passes all blocks wait for each other, so they must run at once: a cooperative launch.

Traffic: reads x once up to what the chip and the L2 hold and writes q: 50 MB of 4096x4096 bf16 on an H200, 12 us at 4.2
TB/s.  A first launch sets the words to 0 over which the blocks meet; this one reads x before that has ended.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.hardware import device_info
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.compilers.kernel_args import I64, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tape import scratch
from tilewright.ops.quant.per_tensor_cast_to_fp8 import FORWARD, PerTensorCastArgs, PerTensorCastBucket
from tilewright.ops.rows import whole_vectors

VECTOR = 16  # bytes that a thread loads at once


class Config(NamedTuple):
    """Threads of a block, which each take a vector of 16 bytes of a row; rows that it keeps in registers and in shared
    memory.
    """

    threads: int
    register_rows: int
    shared_rows: int


class Params(NamedTuple):
    """The compile-time constants of per_tensor_cast."""

    kThreads: int
    kRegisterRows: int
    kSharedRows: int
    Element: torch.dtype


class Args(NamedTuple):
    """The parameters of per_tensor_cast."""

    q: Pointer
    scale: Pointer
    x: Pointer
    meeting: Pointer
    vectors: I64


class PrepareParams(NamedTuple):
    """cast_prepare has no compile-time constants."""


class PrepareArgs(NamedTuple):
    """The parameters of cast_prepare."""

    meeting: Pointer


_FILE = Path(__file__).with_name("per_tensor_cast.cuh")
PREPARE = CudaKernel(_FILE, "cast_prepare", PrepareArgs, archs=("sm_90",), dependent=True)
KERNEL = CudaKernel(_FILE, "per_tensor_cast", Args, archs=("sm_90",), dependent=True, cooperative=True)

CONFIGS = (Config(512, register_rows=20, shared_rows=28), Config(1024, register_rows=6, shared_rows=14))
"""More rows would spill registers."""


_LEAST, _MOST = 20 << 20, 96 << 20
"""Bytes of x between which this kernel is ahead of the two of Triton: 16 MB 11.4 us, 11.4 in Triton; 32 MB 18.2, 20.7;
64 MB 35.7, 41.0; 112 MB 75.4, 72.0; 256 MB 193, 160 (H200, 2026-11)."""


def configure(bucket: PerTensorCastBucket, dtype: torch.dtype) -> Config | None:
    """The most rows on the chip; None for a small x, and for one of which too much is read again."""
    return CONFIGS[0] if _LEAST <= bucket.M * bucket.K * dtype.itemsize <= _MOST else None


def candidates(bucket: PerTensorCastBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Few threads with many rows each, or many with few."""
    return CONFIGS


def why_not(args: PerTensorCastArgs) -> str | None:
    """Why the kernel cannot run these arguments; None if it can."""
    x = args.x
    arch = device_info(x.device).arch
    if arch != "sm_90":
        return f"is written for Hopper (sm_90), and this is {arch}"
    if not x.numel():
        return "has no blocks for an x without elements"
    if not whole_vectors(x, VECTOR):
        return f"needs a contiguous x of whole and aligned vectors of {VECTOR} bytes"
    return None


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor, Tensor], args: PerTensorCastArgs, config: Config) -> None:
    q, scale = outs
    x = args.x
    vectors = x.numel() * x.element_size() // VECTOR
    blocks = max(1, min(usable_sms(x.device), vectors // config.threads))
    meeting = scratch((2,), torch.int32, x.device)
    PREPARE((1,), PrepareArgs(meeting), PrepareParams(), block=1)
    KERNEL(
        (blocks,),
        Args(q, scale, x, meeting, vectors),
        Params(*config, x.dtype),
        block=config.threads,
        shared_bytes=config.shared_rows * config.threads * VECTOR,
    )
