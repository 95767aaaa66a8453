"""top_k in CUDA C++ for Hopper: one launch, a cluster of blocks holds a row in shared memory.

The row is read once.  For small k some 2 k elements reach a bound from maxima of groups: their ranks are counted.  For
larger k the k-th key is searched by rounds of pivots and the k elements are sorted in one block.
128 x 131072 float32, 67 MB, cannot take less than 15 us at 4.4 TB/s.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.compilers.kernel_args import I32, I64, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.ops.rows import as_rows
from tilewright.ops.sampling.kernels.sm90 import resident
from tilewright.ops.sampling.kernels.sm90.resident import Config
from tilewright.ops.sampling.top_k import FORWARD, TopKArgs, TopKBucket

MOST = 2048


class Params(NamedTuple):
    """The compile-time constants of top_k."""

    kThreads: int
    kRowOffset: int
    kBest: int
    Element: torch.dtype


class Args(NamedTuple):
    """The parameters of top_k."""

    values: Pointer
    indices: Pointer
    x: Pointer
    stride: I64
    n: I32
    k: I32
    part_vectors: I32


KERNEL = CudaKernel(Path(__file__).with_name("top_k.cuh"), "top_k", Args, archs=("sm_90",), dependent=True)


def why_not(args: TopKArgs) -> str | None:
    """Why this kernel cannot run a call; None if it can."""
    return resident.why_not(args.x) or (f"takes k up to {MOST}" if args.k > MOST else None)


def configure(bucket: TopKBucket, dtype: torch.dtype) -> Config | None:
    return resident.configure(bucket.M, bucket.N, dtype) if bucket.K <= MOST else None


def candidates(bucket: TopKBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return resident.candidates(bucket.N, dtype)


def best(k: int) -> int:
    """Elements that the first block sorts, a power of two."""
    return max(512, 1 << (k - 1).bit_length())


def row_offset(threads: int, sorted_elements: int) -> int:
    """Bytes before the part of a row (`TopKMemory`)."""
    return resident.row_offset(threads) + 8 * sorted_elements


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=resident.CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor, Tensor], args: TopKArgs, config: Config) -> None:
    x = as_rows(args.x)
    m, n = x.shape
    vectors, sorted_elements = resident.part_vectors(n, x.dtype, config.cluster), best(args.k)
    offset = row_offset(config.threads, sorted_elements)
    KERNEL(
        (m * config.cluster,),
        Args(*outs, x, x.stride(0), n, args.k, vectors),
        Params(config.threads, offset, sorted_elements, x.dtype),
        block=config.threads,
        shared_bytes=offset + resident.VECTOR * vectors,
        cluster=(config.cluster, 1, 1) if config.cluster > 1 else None,
    )
