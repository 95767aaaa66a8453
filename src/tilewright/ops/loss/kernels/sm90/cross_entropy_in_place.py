"""Cross entropy with the gradient written over the logits, in CUDA C++ for Hopper: a cluster holds a row in registers.

Traffic: 4*M*V bytes at bf16, so 4096x128256 cannot beat 489 us at 4.3 TB/s; it takes 621.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.hardware.device import device_info
from tilewright.jit.compilers.kernel_args import F32, I32, I64, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tape import scratch
from tilewright.ops.loss.entropy import TOTALS, Options
from tilewright.ops.loss.in_place import IN_PLACE, InPlaceArgs, InPlaceBucket, in_place_bucket
from tilewright.ops.loss.kernels.triton.rows_launch import count_rows, reduce_rows
from tilewright.ops.rows import no_float64

VECTOR = 16
SHORTEST = 8192  # bytes of a row below which a block is too much for it
MOST_BLOCKS = 8  # of a cluster: more are not portable


class Params(NamedTuple):
    """The compile-time constants."""

    kThreads: int
    kVectors: int
    kBlocks: int
    Element: torch.dtype
    Index: torch.dtype
    kSmooth: bool
    kMean: bool
    kRows: bool
    kGiven: bool


class Args(NamedTuple):
    """The parameters of the kernel."""

    loss: Pointer
    lse: Pointer
    x: Pointer
    target: Pointer
    totals: Pointer
    dloss: Pointer
    stride: I64
    ignore_index: I64
    n: I32
    part_vectors: I32
    smoothing: F32
    z_loss: F32


class Config(NamedTuple):
    """threads: of a block.   vectors: that a thread holds.   blocks: of a multiprocessor, by registers."""

    threads: int
    vectors: int
    blocks: int


KERNEL = CudaKernel(
    Path(__file__).with_name("cross_entropy_in_place.cuh"), "cross_entropy_in_place", Args, archs=("sm_90",)
)
CONFIGS = (Config(512, 8, 2), Config(256, 8, 4), Config(512, 4, 3), Config(256, 16, 2), Config(1024, 8, 1))


def _vectors(n: int, dtype: torch.dtype) -> int:
    return n * dtype.itemsize // VECTOR


def blocks_of_row(n: int, dtype: torch.dtype, config: Config) -> int:
    """Blocks that hold a row: a power of two."""
    blocks = -(-_vectors(n, dtype) // (config.threads * config.vectors))
    return 1 << (blocks - 1).bit_length()


def shared_bytes(threads: int) -> int:
    """A barrier, two numbers of 16 blocks, three of each warp and of the row."""
    return 8 + 2 * 16 * 8 + 12 * (threads // 32 + 1) + 4


def why_not(args: InPlaceArgs) -> str | None:
    """Why this kernel cannot run a call; None if it can."""
    x, bucket = args.logits, in_place_bucket(args)
    arch = device_info(x.device).arch
    if arch != "sm_90":
        return f"is written for Hopper's clusters (sm_90), and this is {arch}"
    if bucket.special:
        return "has no class weights and no softcap"
    if not bucket.aligned:
        return "needs rows of whole, aligned vectors of 16 bytes"
    return no_float64(*args[:5])


def configure(bucket: InPlaceBucket, dtype: torch.dtype) -> Config | None:
    """Takes one block for a row that it holds, and else clusters of small blocks."""
    # H200, 2026-11: 4096 x 128256 in bf16 621 us by 8 blocks of 256 threads, 658 by 4 of 512; 8192 x 32000 290 us by
    # one block of 512 threads, 300 by two of 256; other forms 726 and more, 339 and more
    fitting = candidates(bucket, dtype)
    large, small = CONFIGS[:2]
    if large in fitting and (blocks_of_row(bucket.N, dtype, large) == 1 or small not in fitting):
        return large
    return small if small in fitting else fitting[0] if fitting else None


def candidates(bucket: InPlaceBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    if bucket.special or not bucket.aligned or bucket.N * dtype.itemsize < SHORTEST:
        return ()
    return tuple(c for c in CONFIGS if blocks_of_row(bucket.N, dtype, c) <= MOST_BLOCKS)


@register_kernel(
    IN_PLACE,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=why_not,
    batch_invariant=False,
)
def launch(outs: tuple[Tensor, ...], args: InPlaceArgs, config: Config) -> None:
    loss, lse = outs
    x, options = args.logits, Options(*args[5:])
    m, n = x.shape
    target, dloss = args.target.contiguous(), None if args.dloss is None else args.dloss.contiguous()
    of_rows, mean = options.reduction == "none", options.reduction == "mean"
    rows = loss if of_rows else scratch((m,), torch.float32, x.device)
    totals = scratch((TOTALS,), torch.float32, x.device) if args.totals is None else args.totals.contiguous()
    if mean and args.totals is None:
        count_rows(totals, target, None, n, options)
    cluster = blocks_of_row(n, x.dtype, config)
    KERNEL(
        (m * cluster,),
        Args(
            rows, lse, x, target, totals, totals if dloss is None else dloss, x.stride(0), options.ignore_index, n,
            -(-_vectors(n, x.dtype) // cluster), options.label_smoothing, options.z_loss,
        ),
        Params(
            *config, x.dtype, target.dtype, kSmooth=options.label_smoothing != 0, kMean=mean, kRows=of_rows,
            kGiven=dloss is not None,
        ),
        block=config.threads,
        shared_bytes=shared_bytes(config.threads),
        cluster=(cluster, 1, 1) if cluster > 1 else None,
    )  # fmt: skip
    if not of_rows:
        reduce_rows(loss, totals, rows, lse, target, None, n, options, count=False)
