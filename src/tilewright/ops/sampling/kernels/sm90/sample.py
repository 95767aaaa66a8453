"""sample in CUDA C++ for Hopper: one launch, a cluster of blocks holds a row in shared memory.

The logits are read once.  Where top-k restricts a row to few tokens, a key that at least k logits reach, from maxima of
groups, leaves a list of some 2 k of them, from which one block draws; else thresholds are found by rounds of seven
pivots over shared memory.  128 x 131072 float32, 67 MB, cannot take less than 15 us at 4.4 TB/s.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.compilers.kernel_args import F32, I32, I64, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.ops.rows import as_rows
from tilewright.ops.sampling.kernels.sm90 import resident
from tilewright.ops.sampling.kernels.sm90.resident import Config
from tilewright.ops.sampling.sample import FORWARD, SampleArgs, SampleBucket


class Params(NamedTuple):
    """The compile-time constants of sample."""

    kThreads: int
    kRowOffset: int
    Element: torch.dtype


class Args(NamedTuple):
    """The parameters of sample."""

    tokens: Pointer
    logprobs: Pointer
    logits: Pointer
    seeds: Pointer
    positions: Pointer
    temperatures: Pointer
    top_ks: Pointer
    top_ps: Pointer
    min_ps: Pointer
    temperature: F32
    top_k: I32
    top_p: F32
    min_p: F32
    stride: I64
    n: I32
    part_vectors: I32
    mode: I32


KERNEL = CudaKernel(Path(__file__).with_name("sample.cuh"), "sample", Args, archs=("sm_90",), dependent=True)


def why_not(args: SampleArgs) -> str | None:
    """Why this kernel cannot run a call; None if it can."""
    return resident.why_not(args.logits)


def configure(bucket: SampleBucket, dtype: torch.dtype) -> Config | None:
    return resident.configure(bucket.M, bucket.N, dtype)


def candidates(bucket: SampleBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return resident.candidates(bucket.N, dtype)


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=resident.CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor, Tensor], args: SampleArgs, config: Config) -> None:
    x = as_rows(args.logits)
    m, n = x.shape
    vectors = resident.part_vectors(n, x.dtype, config.cluster)
    temperatures, top_ks, top_ps, min_ps = (
        None if t is None else t.contiguous() for t in (args.temperatures, args.top_ks, args.top_ps, args.min_ps)
    )
    kernel_args = Args(
        tokens=outs[0],
        logprobs=outs[1] if args.logprobs else None,
        logits=x,
        seeds=args.seeds.contiguous(),
        positions=args.positions.contiguous(),
        temperatures=temperatures,
        top_ks=top_ks,
        top_ps=top_ps,
        min_ps=min_ps,
        temperature=float(args.temperature),
        top_k=args.top_k,
        top_p=float(args.top_p),
        min_p=float(args.min_p),
        stride=x.stride(0),
        n=n,
        part_vectors=vectors,
        mode=args.logprobs,
    )
    KERNEL(
        (m * config.cluster,),
        kernel_args,
        Params(config.threads, resident.row_offset(config.threads), x.dtype),
        block=config.threads,
        shared_bytes=resident.shared_bytes(config.threads, vectors),
        cluster=(config.cluster, 1, 1) if config.cluster > 1 else None,
    )
