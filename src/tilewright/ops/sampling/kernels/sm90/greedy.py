"""greedy in CUDA C++ for Hopper: one launch, a cluster of blocks reads a row, loads of 16 bytes.

128 x 131072 float32, 67 MB, cannot take less than 15 us at 4.4 TB/s.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.compilers.kernel_args import I32, I64, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.ops.rows import RowsBucket, as_rows, no_float64
from tilewright.ops.sampling.greedy import FORWARD, GreedyArgs
from tilewright.ops.sampling.kernels.sm90 import resident
from tilewright.ops.sampling.kernels.sm90.resident import Config


class Params(NamedTuple):
    """The compile-time constants of greedy."""

    kThreads: int
    Element: torch.dtype


class Args(NamedTuple):
    """The parameters of greedy."""

    tokens: Pointer
    logits: Pointer
    stride: I64
    n: I32
    part_vectors: I32


KERNEL = CudaKernel(Path(__file__).with_name("greedy.cuh"), "greedy", Args, archs=("sm_90",), dependent=True)
CONFIGS = tuple(Config(cluster, threads) for cluster in resident.CLUSTERS for threads in (256, 512))


def why_not(args: GreedyArgs) -> str | None:
    """Why this kernel cannot run a call; None if it can."""
    return resident.why_not_arch(args.logits) or no_float64(args.logits)


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    """Chooses the fewest blocks of at most 128 KB that fill the GPU four times; up to eight rows have up to 16 of 512
    threads, none with less than 8 KB.
    """
    # H100, 2026-11, 131072 in float32: 128 rows 26.9 us (8 blocks 30.1, 1 block of 512 threads 33.0), 1 row 3.0
    # (256 threads 4.5, 8 blocks 4.7)
    size = bucket.N * dtype.itemsize
    for cluster in resident.CLUSTERS:
        if size <= cluster << 13:
            return Config(cluster, 512)
        if bucket.M > 8 and bucket.M * cluster >= 512 and size <= cluster << 17:
            return Config(cluster, 256)
    return Config(resident.CLUSTERS[-1], 512 if bucket.M <= 8 else 256)


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return CONFIGS


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: GreedyArgs, config: Config) -> None:
    x = as_rows(args.logits)
    m, n = x.shape
    KERNEL(
        (m * config.cluster,),
        Args(outs[0], x, x.stride(0), n, resident.part_vectors(n, x.dtype, config.cluster)),
        Params(config.threads, x.dtype),
        block=config.threads,
        shared_bytes=8 + 8 * (config.threads // 32) + 8 * 16,
        cluster=(config.cluster, 1, 1) if config.cluster > 1 else None,
    )
