"""verify_chain in CUDA C++ for Hopper: one launch, a cluster of blocks takes a request and holds its two rows.

Only the rows of the first rejected draft are read, p and q: 8 V bytes a request; 32 requests of 131072 tokens, 34 MB,
cannot take less than 8 us at 4.4 TB/s.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.collect import collecting
from tilewright.jit.compilers.kernel_args import I32, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.ops.sampling.kernels.sm90 import resident
from tilewright.ops.sampling.kernels.sm90.resident import Config
from tilewright.ops.sampling.verify_chain import FORWARD, VerifyChainArgs, VerifyChainBucket

ROW_OFFSET = 1024


class Params(NamedTuple):
    """The compile-time constants of verify_chain."""

    kThreads: int
    kRowOffset: int
    kCertain: bool


class Args(NamedTuple):
    """The parameters of verify_chain."""

    tokens: Pointer
    accepted: Pointer
    p: Pointer
    q: Pointer
    drafts: Pointer
    seeds: Pointer
    positions: Pointer
    vocabulary: I32
    n: I32
    part_vectors: I32


KERNEL = CudaKernel(
    Path(__file__).with_name("verify_chain.cuh"), "verify_chain", Args, archs=("sm_90",), dependent=True
)
CONFIGS = tuple(Config(cluster, 256) for cluster in resident.CLUSTERS)
SPACE = tuple(Config(cluster, threads) for cluster in resident.CLUSTERS for threads in (256, 512))


def why_not(args: VerifyChainArgs) -> str | None:
    """Why this kernel cannot run a call; None if it can."""
    vocabulary = args.target_probs.shape[2]
    if (reason := resident.why_not_arch(args.target_probs)) is not None:
        return reason
    if not _fits(vocabulary, resident.CLUSTERS[-1]):
        return f"holds two rows in {resident.CLUSTERS[-1]} blocks, got {vocabulary} tokens"
    given = [t for t in (args.target_probs, args.draft_probs) if t is not None]
    if vocabulary % 4 or (collecting() is None and any(t.data_ptr() % 16 for t in given)):
        return f"takes rows that begin at multiples of 16 bytes, got {vocabulary} tokens"
    return None


def _fits(vocabulary: int, cluster: int) -> bool:
    return 2 * resident.VECTOR * resident.part_vectors(vocabulary, torch.float32, cluster) <= resident.PART


def configure(bucket: VerifyChainBucket, dtype: torch.dtype) -> Config | None:
    """Chooses the fewest blocks a request, of at least 1024 tokens, that fill the GPU four times.  Unmeasured."""
    fitting = [config for config in CONFIGS if _fits(bucket.N, config.cluster)] if bucket.N % 4 == 0 else []
    for config in fitting:
        if bucket.M * config.cluster >= 512 or 1024 * config.cluster >= bucket.N:
            return config
    return fitting[-1] if fitting else None


def candidates(bucket: VerifyChainBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return tuple(config for config in SPACE if bucket.N % 4 == 0 and _fits(bucket.N, config.cluster))


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor, Tensor], args: VerifyChainArgs, config: Config) -> None:
    p, drafts, seeds, positions = (t.contiguous() for t in args[:4])
    certain = args.draft_probs is None
    q = p if args.draft_probs is None else args.draft_probs.contiguous()
    b, steps, vocabulary = p.shape
    vectors = resident.part_vectors(vocabulary, p.dtype, config.cluster)
    KERNEL(
        (b * config.cluster,),
        Args(*outs, p, q, drafts, seeds, positions, vocabulary, steps - 1, vectors),
        Params(config.threads, ROW_OFFSET, certain),
        block=config.threads,
        shared_bytes=ROW_OFFSET + (1 if certain else 2) * resident.VECTOR * vectors,
        cluster=(config.cluster, 1, 1) if config.cluster > 1 else None,
    )
