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
CONFIGS = tuple(Config(cluster, 256) for cluster in resident.CLUSTERS)
SPACE = tuple(Config(cluster, threads) for cluster in resident.CLUSTERS for threads in (128, 256, 512))


def why_not(args: GreedyArgs) -> str | None:
    """Why this kernel cannot run a call; None if it can."""
    return resident.why_not_arch(args.logits) or no_float64(args.logits)


def configure(bucket: RowsBucket, dtype: torch.dtype) -> Config:
    """Chooses the fewest blocks a row that fill the GPU eight times, each with 8 KB or more.  Unmeasured."""
    for config in CONFIGS:
        if bucket.M * config.cluster >= 1024 or bucket.N * dtype.itemsize <= config.cluster << 13:
            return config
    return CONFIGS[-1]


def candidates(bucket: RowsBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return SPACE


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
